"""One of several processes that extract a store; for `spawn`, which imports it by name."""

import json
import os

from eagle31_train import cli
from eagle31_train.extract import extract
from eagle31_train.store import StoreWriter


def one(rank, ranks, arguments, stops_after):
    """As a launcher starts it; stops after so many shards as a kill does, uncleaned."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    right, written = StoreWriter.write, []

    def write(self, shard, *rest):
        if len(written) == stops_after:
            os._exit(9)
        right(self, shard, *rest)
        written.append(shard.name)

    StoreWriter.write = write
    cli.run(extract, "", arguments)


def timeless(files):
    """Every file of a store, its manifest without the time it took."""
    manifest = json.loads(files["manifest.json"])
    assert manifest.pop("seconds") > 0
    del manifest["check"]
    return {**files, "manifest.json": json.dumps(manifest)}
