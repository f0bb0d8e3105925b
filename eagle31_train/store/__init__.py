"""The store of hidden states: sharded safetensors, written once by any number of processes, and checked when read.

`format.py` describes the files. Reading starts at `reader.py`, writing at `writer.py`; `eagle31 store` inspects a
store.
"""

from typing import Any

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.common.units import byte_count
from eagle31_train.config import Config
from eagle31_train.store.backends import Storage, open_storage
from eagle31_train.store.format import REMAKE, read_record
from eagle31_train.store.head import finished
from eagle31_train.store.reader import Store, StoreSplit
from eagle31_train.store.sealed import DamagedError
from eagle31_train.store.shard_plan import PlannedShard, make_plan, shape_of
from eagle31_train.store.writer import StoreWriter

__all__ = ["PlannedShard", "Store", "StoreSplit", "StoreWriter", "finished", "make_plan", "shape_of"]


def storage_of(config: Config) -> Storage:
    most = byte_count(config.store.cache_bytes, "store.cache_bytes")
    return open_storage(config.store_location, config.cache_folder, most)


def read_manifest(config: Config) -> dict[str, Any] | None:
    """Return the manifest of the configured store, or None if there is no complete store."""
    try:
        return read_record(storage_of(config), artifacts.MANIFEST, dict)
    except DamagedError as error:
        raise UserError(f"{error}: {REMAKE}") from None
