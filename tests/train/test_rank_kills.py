"""A rank is killed: the launch ends, the same command goes on, and at the end no bit differs. Where its launcher is,
the ranks end by themselves (test_launch.py), or are named (tests/test_locks.py)."""

import os
import random
import signal
import socket
from contextlib import nullcontext

import pytest
from launching import arguments, free_port
from surviving import agent, death, differences, ends_well, lines, ranks_of, wait_until

STEPS = 80
RECIPE = [f"train.max_steps={STEPS}", "train.epochs=1000", "train.eval_every=15", "train.checkpoint_every=2"]
# What a rank of any profile calls in a step, at least so often in four; and what it calls at its start.
IN_STEP = (
    ("train.loader.build_batch", 4),  # in another thread, ahead
    ("train.trainer.accumulate", 4),
    ("train.trainer.Trainer.train_step", 4),
    ("train.trainer.Trainer.log", 4),
    ("train.trainer.take_snapshot", 2),
    ("train.windows.Usage.release", 3),
)
AT_START = tuple((f"train.prepare.{name}", 1) for name in ("launch_processes", "claim_folder", "restore", "make_meter"))
SNAPSHOT = (("train.trainer.take_snapshot", 2),)  # while ranks send their parts to the first, which is to save them
CALLS = {"step": IN_STEP, "start": AT_START, "snapshot": SNAPSHOT}
WAYS = ["step"] * 6 + ["save"] * 4 + ["snapshot"] * 2 + ["start"] * 3 + ["outside"] * 5


def launch(run, profile, output, **more):
    return agent(profile, arguments(run, *RECIPE), output, ledger=str(run.folder / "ledger"), **more)


def finish(run, profile, output):
    ends_well(launch(run, profile, output), output)
    return run


def killed(run, profile, output, way, chosen):
    """One launch, until a rank is killed and everything has ended."""
    victim = 0 if way == "save" else chosen.randrange(2)  # the first writes alone, beside training
    disturbance = death(way, chosen, CALLS)
    said, ledger = len(output.read_text()), run.folder / f"ledger.{victim}"
    wanted = lines(ledger) + chosen.randint(1, 3)
    with launch(run, profile, output, victim=victim, **disturbance) as process:
        if way == "outside":
            wait_until(lambda: lines(ledger) >= wanted, process.is_alive)
            os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
        process.join()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    text = output.read_text()[said:]
    assert process.exitcode == 1, (way, disturbance, text[-3000:])
    # The other's error may be the first that the agent sees.
    assert way == "outside" or f"rank {victim} dies\n" in text, (way, disturbance, text[-3000:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("profile", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_launch_of_which_a_rank_is_killed_twenty_times_ends_bit_for_bit_the_same(new_run, tmp_path, profile):
    whole = finish(new_run(), profile, tmp_path / "whole")
    run, output, ways, chosen = new_run(), tmp_path / "output", list(WAYS), random.Random(profile)
    output.touch()
    chosen.shuffle(ways)
    for way in ways:
        killed(run, profile, output, way, chosen)
    finish(run, profile, output)
    assert not differences(run, whole)
    assert lines(run.folder / "ledger.0") > STEPS, "no step was done twice: nothing was lost by a kill"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", ["fsdp2", "zero2", "zero3"])
def test_a_rank_that_dies_is_started_again_beside_the_others(new_run, tmp_path, profile):
    whole = finish(new_run(), profile, tmp_path / "whole")
    run, output = new_run(), tmp_path / "output"
    ledger = run.folder / "ledger.0"
    with launch(run, profile, output, restarts=3) as process:
        for _ in range(3):
            wanted = lines(ledger) + 5
            wait_until(lambda: lines(ledger) >= wanted, process.is_alive)  # noqa: B023 (within this turn)
            os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        process.join()
    assert process.exitcode == 0, output.read_text()[-3000:]
    assert not differences(run, whole)
    assert lines(ledger) > STEPS, "no step was done twice: nothing was lost by a kill"


# ---------------------------------------------------------------- machines

SECOND_DIES = ("step", "save", "start", "step")


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def moment(run, kind, machine, chosen):
    """Whether a machine is where it is to die: ranks have taken some steps, one saves, or they have just begun."""
    ledger = run.folder / "ledger.0"
    begun = lines(ledger)
    wanted = begun + chosen.randint(1, 4)
    match kind:
        case "step":
            return lambda: lines(ledger) >= wanted
        case "save":
            return lambda: lines(ledger) > begun and any(run.checkpoints.glob(".step-*"))
    return lambda: ranks_of(machine.pid)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_training_goes_on_by_itself_when_a_machine_that_died_comes_back(new_run, tmp_path):
    """Two torchrun agents, which meet at the first one: where the second dies, the first waits for it. Where the first
    dies, so does their meeting: both are started again."""
    whole = finish(new_run(), "ddp", tmp_path / "whole")
    run, chosen = new_run(), random.Random(0)

    def join(output, port):
        where = {"endpoint": f"127.0.0.1:{port}", "machines": 2, "restarts": 20}
        return launch(run, "ddp", tmp_path / output, **where)

    port = free_port()
    with join("first", port) as first:
        wait_until(lambda: listens(port), first.is_alive)
        for kind in SECOND_DIES:
            machine_killed(run, kind, join("second", port), chosen)
            assert first.is_alive(), (tmp_path / "first").read_text()[-3000:]
        with join("second", port) as second:
            machine_killed(run, "step", nullcontext(first), chosen)
            second.join()
            assert second.exitcode == 1
    port = free_port()
    with join("first", port) as first, join("second", port) as second:
        first.join()
        second.join()
    assert (first.exitcode, second.exitcode) == (0, 0), (tmp_path / "second").read_text()[-3000:]
    assert not differences(run, whole)


def machine_killed(run, kind, machine, chosen):
    with machine as process:
        wait_until(moment(run, kind, process, chosen), process.is_alive)
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
