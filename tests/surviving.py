"""Trainings in processes of their own, which die or are told to stop where a test wants it.

As a script, this module is train.py with the disturbance that the variable DISTURB says, for real launches.
"""

import ctypes
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from unittest.mock import patch

import several
from dying import Machine, running
from forking import print_to, served
from watching import noted, updates_of

from eagle31_train import cli
from eagle31_train.store.sealed import unseal
from train import launch, loader
from train.checkpoint import Saver

TIMED = ("seconds", "waited", "files")  # a checkpoint's own manifest, which is listed, says seconds too
STAGES = {"train": "train.loop.train", "extract": "eagle31_train.extract.extract"}


# ---------------------------------------------------------------- how it dies


class InSaves(Machine):
    """Counts what the savers' threads do to the file system, from save to save."""

    thread = None

    def operation(self, name):
        if threading.get_ident() == self.thread:
            super().operation(name)


@contextmanager
def saves_on(machine):
    """Every save of the block happens on this machine."""
    original = Saver._save

    def save(self, *given):
        machine.thread = threading.get_ident()
        with running(machine):
            original(self, *given)

    with patch.object(Saver, "_save", save):
        yield machine


@contextmanager
def calling(path, action, when, number):
    """`action` happens before or after the call of this number, or every call without one."""
    original, calls = pkgutil.resolve_name(path), count(1)

    def call(*arguments, **named):
        now = number in (None, next(calls))
        if now and when == "before":
            action()
        result = original(*arguments, **named)
        if now and when == "after":
            action()
        return result

    with patch(path, call):
        yield


def death(way, chosen, calls, operations=40):
    """A disturbance: death in a save, or before or after one of `calls[way]`, each of which is made at least so often;
    none for other ways. operations: of the file system, in the first saves."""
    if way == "save":
        return {"kill_in_save": chosen.randrange(operations)}
    if way not in calls:
        return {}
    path, most = chosen.choice(calls[way])
    return {"kill_at": (path, chosen.choice(["before", "after"]), chosen.randint(1, most))}


def die(*_):
    os.write(2, f"rank {os.environ.get('RANK', 0)} dies\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def tell():
    os.kill(os.getpid(), signal.SIGTERM)


def disturbances(ledger=None, kill_in_save=None, kill_at=None, grace=None, tell_at=None, victim=None):
    """The patches, as one context each.

    Args:
        ledger: see `noted`; with several ranks, each has a file of its own.
        kill_in_save: SIGKILL at this operation of the file system, counted over the saves.
        kill_at: [function, "before" or "after" it, number of the call]: SIGKILL there.
        grace: seconds that data is waited for after a SIGTERM.
        tell_at: [rank, step]: this rank alone is sent a SIGTERM while it trains this step of the launch.
        victim: the rank that is killed; the others live.
    """
    rank = os.environ.get("RANK")
    if ledger is not None:
        yield noted(ledger if rank is None else f"{ledger}.{rank}")
    if victim is not None and rank != str(victim):
        return
    if kill_in_save is not None:
        yield saves_on(InSaves(kill_in_save, die))
    if kill_at is not None:
        path, when, number = kill_at
        yield calling(path, die, when, number)
    if grace is not None:
        yield patch.object(loader, "GRACE", grace)
    if tell_at is not None and rank == str(tell_at[0]):
        yield calling("train.trainer.accumulate", tell, "before", tell_at[1])


# ---------------------------------------------------------------- children


def working(stage, arguments, output, **disturbance):
    """A stage in a child. What it prints is added to `output`."""
    output.touch()
    return served(child, stage, arguments, str(output), disturbance)


def agent(profile, arguments, output, endpoint="localhost:0", machines=1, restarts=0, **disturbance):
    """A torchrun agent and its ranks: two on the only machine, else one on each of those that meet at an endpoint."""
    output.touch()
    how = {"min_nodes": machines, "max_nodes": machines, "nproc_per_node": 2 if machines == 1 else 1}
    how |= {"rdzv_endpoint": endpoint, "max_restarts": restarts}
    return served(lead, profile, arguments, str(output), how, disturbance)


def ranks_of(leader):
    """The ranks' processes, in order, of a running agent, which has no other children."""
    return sorted(map(int, Path(f"/proc/{leader}/task/{leader}/children").read_text().split()))


@contextmanager
def launched(command, environment):
    """A launch in a session of its own, with its standard error to be read; nothing of it outlives the block."""
    how = {"cwd": Path(__file__).resolve().parent.parent, "env": environment, "start_new_session": True}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **how, **streams)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def child(stage, arguments, output, disturbance):
    print_to(output)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
    sys.argv = [stage, *arguments]
    main(disturbance, stage)


def lead(profile, arguments, output, how, disturbance):
    """As torchrun does it, except that ranks are forked instead of imported anew."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    print_to(output)
    if profile.startswith("zero"):
        import deepspeed  # noqa: F401 (once for all ranks)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    if how["max_restarts"]:  # else who comes back waits for the address of the first until it gives up
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    fixed = {"rdzv_backend": "c10d", "run_id": "kills", "start_method": "fork", "local_addr": "127.0.0.1"}
    elastic_launch(LaunchConfig(**how, **fixed), take_part)(profile, arguments, disturbance)


def take_part(profile, arguments, disturbance):
    """One rank, in the environment that accelerate's launcher makes of a profile."""
    launch.PARENT = os.getppid()  # it was forked, with what its server had imported
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: a command that torchrun starts outlives it, too
    sys.argv = ["train", *arguments]
    with patch.dict(os.environ, several.environment(profile), clear=True):
        main(disturbance)


def main(disturbance, stage="train"):
    with ExitStack() as patches:
        for context in disturbances(**disturbance):
            patches.enter_context(context)
        tells = "train.precision" if stage == "train" else "target.dtype"
        cli.run(pkgutil.resolve_name(STAGES[stage]), "", tells=tells)


def ends_well(launch, output):
    """Let a launch in a child come to its end; where it did not end well, say what it printed."""
    with launch as process:
        process.join()
    assert process.exitcode == 0, output.read_text()[-3000:]


def dies(launch, progress, chosen, output, **disturbance):
    """A launch dies by a disturbance, or without one by a kill from outside, once it has got on a little."""
    wanted = progress() + chosen.randint(1, 3)
    with launch(**disturbance) as process:
        if not disturbance:
            wait_until(lambda: progress() >= wanted, process.is_alive)
            process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, (disturbance, output.read_text()[-3000:])


def wait_until(condition, alive):
    """Look again and again until it is so, while `alive()`."""
    pause = threading.Event()
    while not condition():
        assert alive(), "it ended before"
        pause.wait(0.002)


# ---------------------------------------------------------------- what came of it


def result(run):
    """All that must not depend on stops: what was trained, losses, rates, weights, moments, totals."""
    files = {path.name: path.read_bytes() for path in run.newest().iterdir()}
    assert len(files) == 4
    manifest = unseal(files.pop("manifest.json"))
    return {
        "updates": [updates_of(ledger) for ledger in sorted(run.folder.glob("ledger*"))],
        "rows": (run.train / "metrics.jsonl").read_bytes(),
        "state": timeless(manifest["extra"]["state"]),
        "manifest": timeless(run.manifest()),
        **files,
    }


def timeless(facts):
    return {name: value for name, value in facts.items() if name not in TIMED}


def differences(run, whole):
    ours, theirs = result(run), result(whole)
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


if __name__ == "__main__":
    main(json.loads(os.environ["DISTURB"]))
