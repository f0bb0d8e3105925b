"""eagle31: train an EAGLE 3.1 drafter for a target, from any folder.

    eagle31 plan target.path=Qwen/Qwen2.5-7B-Instruct            estimate its cost, before anything is spent
    eagle31 run  target.path=Qwen/Qwen2.5-7B-Instruct name=qwen  all five stages; the same command resumes

`eagle31 COMMAND --help` lists every option, `eagle31 --version` prints the version.
"""

import ast
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from eagle31_train.common.console import explained, note, tidy
from eagle31_train.common.errors import UserError

# Command → the module to run, and what it does.
COMMANDS = {
    "run": ("eagle31_train.run", "run every stage in turn, from prompts to a checkpoint that vLLM serves"),
    "plan": ("eagle31_train.plan", "the drafter's shape, bytes, FLOPs, hours and memory, before anything is spent"),
    "data": ("data_prep", "stage 1: prompts or conversations → answers, token ids, loss masks, draft vocabulary"),
    "extract": ("eagle31_train.extract", "stage 2: the target's hidden states → the store"),
    "train": ("train", "stage 3: fit the drafter (several devices: accelerate launch train.py)"),
    "evaluate": ("eagle31_train.evaluate", "stage 4: acceptance length by real decoding"),
    "export": ("eagle31_train.export", "stage 5: the checkpoint that vLLM serves, and its card"),
    "summary": ("eagle31_train.summary", "print the table of a finished run"),
    "report": ("eagle31_train.report", "draw a training's curves as a page"),
    "compare": ("eagle31_train.compare", "compare drafters on the same prompts"),
    "store": ("eagle31_train.store", "inspect or verify a store"),
    "new": ("eagle31_train.new", "write a commented recipe into this folder"),
    "completion": ("eagle31_train.completion", "completion of commands and options for bash or zsh"),
}
# Commands whose modules take seconds to import, which `--help` avoids → what their usage line shows before the options.
SLOW = {"evaluate": "", "export": "", "summary": "", "compare": "DRAFTER … "}


def main() -> None:
    with explained(), tidy():  # also handles Ctrl-C during imports, which take seconds
        _run(sys.argv[1] if len(sys.argv) > 1 else "--help")


def _run(command: str) -> None:
    if command in ("-h", "--help"):
        note(usage())
        return
    if command == "--version":
        try:
            note(f"eagle31 {version('eagle31')}")
        except PackageNotFoundError:
            raise UserError("eagle31 has no version, as it is not installed: run `pip install .`") from None
        return
    if sys.platform != "linux":
        raise UserError("eagle31 runs only on Linux: use a container, a virtual machine or WSL")
    if command not in COMMANDS:
        raise UserError(f"no command {command!r}: choose one of {', '.join(COMMANDS)}")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder no longer exists: change to another one") from None
    from eagle31_train.common.locations import STAGES  # this import needs the working directory, too

    sys.argv = [f"eagle31 {command}", *sys.argv[2:]]
    if command in SLOW and {"-h", "--help"} & set(sys.argv):
        from eagle31_train import cli

        source = Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
        cli.run(lambda _: None, ast.get_docstring(ast.parse(source)) or "", before=SLOW[command])
    sys.path.insert(0, str(STAGES))  # ahead of the user's own train.py or data_prep/
    runpy.run_module(COMMANDS[command][0], run_name="__main__")


def usage() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [__doc__ or "", "commands:", *(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())]
    )


if __name__ == "__main__":
    main()
