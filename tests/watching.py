"""What a training does and holds, noted from inside: the samples of each update, memory, open files, threads."""

import json
import os
import threading
from contextlib import contextmanager

import pytest
from planting import replaced

from eagle31_train.store import StoreSplit
from train import loader, prepare, trainer


@contextmanager
def noted(ledger):
    """Note the samples of each update where their documents are read, not where their order is worked out."""
    reading, under_way = threading.local(), []
    with pytest.MonkeyPatch.context() as patch:

        @replaced(patch, StoreSplit, "read_all")
        def read(read_all, self, indices, *more, **named):
            reading.samples = list(indices)
            return read_all(self, reading.samples, *more, **named)

        @replaced(patch, loader, "build_batch")
        def built(build, *arguments, **named):
            batch = build(*arguments, **named)
            object.__setattr__(batch, "samples", reading.samples)  # it is frozen
            return batch

        @replaced(patch, trainer, "accumulate")
        def accumulated(accumulate, parallel, micro_batches, *more):
            under_way[:] = sorted(i for micro in micro_batches if micro.real for i in micro.batch.samples)
            return accumulate(parallel, micro_batches, *more)

        @replaced(patch, prepare, "parallelise")
        def parallelised(parallelise, *arguments):
            parallel = parallelise(*arguments)

            @replaced(patch, parallel, "update")
            def updated(update, *rest):
                result = update(*rest)
                row = json.dumps({"update": parallel.updates, "samples": list(under_way)})
                # One line, whole whatever happens to the process afterwards.
                descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(descriptor, row.encode() + b"\n")
                os.close(descriptor)
                return result

            return parallel

        yield


def updates_of(ledger):
    """What the updates trained that the weights have had: those after a checkpoint, done again, count once."""
    done = []
    for line in ledger.read_text().splitlines():
        row = json.loads(line)
        assert 1 <= row["update"] <= len(done) + 1, f"update {row['update']} after only {len(done)}"
        done[row["update"] - 1 :] = [row["samples"]]
    return done
