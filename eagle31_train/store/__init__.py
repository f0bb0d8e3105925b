"""The store of hidden states: sharded safetensors, written once, by any number of processes, anywhere, and checked.

    store/provenance.json     what the states are of: target, layers, codecs, data; written first
    store/plan.json           every sample's length and every shard's samples
    store/target.safetensors  the target's embedding rows, final norm and lm_head; target.json is its line
    store/shards/train-00000.safetensors …   many samples each, concatenated without padding
    store/shards/train-00000.json …          one line for each committed shard, with its checksum
    store/shards.jsonl        those lines together, in their place, once all are there
    store/manifest.json       written last: the store is complete

Every JSON file carries a checksum of itself. A shard is committed once its line is there. While a training
follows a store that is still being written, consumed.json says which shards it has used up and removed.

Reading starts at `reader.py`, writing at `writer.py`; `python -m eagle31_train.store --help` looks into a store.
"""

import os
from typing import Any

from eagle31_train import artifacts
from eagle31_train.place import Place, open_place
from eagle31_train.schema import Config, byte_count
from eagle31_train.store.complete import finished
from eagle31_train.store.ledger import EXTRACT, REMAKE, TARGET
from eagle31_train.store.plan import Plan, PlannedShard, make_plan, plan_shards, shape_of
from eagle31_train.store.reader import Store, StoreSplit
from eagle31_train.store.sealed import read_sealed
from eagle31_train.store.writer import StoreWriter

__all__ = [
    "EXTRACT",
    "REMAKE",
    "TARGET",
    "Plan",
    "PlannedShard",
    "Store",
    "StoreSplit",
    "StoreWriter",
    "finished",
    "make_plan",
    "place_of",
    "plan_shards",
    "read_manifest",
    "shape_of",
]


def place_of(config: Config) -> Place:
    """Where the configuration's store lies."""
    most = byte_count(config.store.cache_bytes, "store.cache_bytes")
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of this machine that use the cache
    return open_place(config.store_location, config.cache_folder, most, sharers)


def read_manifest(config: Config) -> dict[str, Any] | None:
    """The manifest of the configuration's store, or None if there is no complete store."""
    place = place_of(config)
    try:
        return read_sealed(place.read(artifacts.MANIFEST), f"{place.location}/{artifacts.MANIFEST}", REMAKE)
    except FileNotFoundError:
        return None
