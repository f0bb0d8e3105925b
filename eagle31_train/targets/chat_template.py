"""Read a target's chat template, which is its author's program, and check that it terminates.

transformers renders it in Jinja's sandbox, which denies it files and Python, but does not stop an endless loop or a
product of gigabytes. So before any other use, it is tried once in a separate process with limits.
"""

import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from typing_extensions import TypedDict

from eagle31_train.common import foreign
from eagle31_train.common.errors import UserError
from eagle31_train.config import TargetConfig
from eagle31_train.targets.pretrained import source

OBJECT = re.compile(r'\s*\{\s*"')  # how a JSON object begins, and no Jinja
MOST = 1 << 20  # bytes of a template; the longest in use have about 30,000
SECONDS, MEMORY = 10, 1 << 30  # limits (s, bytes) for rendering TRIED, a thousand times what templates take
TRIED: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": role, "content": "Hello"} for role in ("system", "user", "assistant", "user")],
]


class _Processor(TypedDict):
    chat_template: str


def templates_of(target: TargetConfig, tokenizer: Any) -> dict[str, str]:
    """Return a target's templates by name, `default` and perhaps `tool_use`: target.chat_template, or the tokenizer's.
    UserError if there is none, it cannot be read, or a few words take too much to render."""
    try:
        if target.chat_template is not None:
            where = f"target.chat_template={target.chat_template}"
            named = {"default": _read(Path(target.chat_template))}
        else:
            where = f"the chat template of {target.path}"
            own = tokenizer.chat_template or _of_processor(target)
            named = foreign.typed(dict[str, str], own if isinstance(own, dict) else {"default": own or ""})
    except FileNotFoundError:
        raise UserError(f"{where} does not exist: set it to a Jinja file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read ({error}): set target.chat_template to a Jinja file") from None
    if not named.get("default"):
        raise UserError(f"the tokenizer of {target.path} has no chat template: set target.chat_template=FILE")
    options = {"tokenize": False, "add_generation_prompt": True, **target.template_args}
    for text in named.values():
        render = partial(tokenizer.apply_chat_template, chat_template=text, **options)
        _check_ends(render, len(text), where)
    return named


def _read(file: Path) -> str:
    """Read a template from a Jinja file, or from a processor's chat_template.json."""
    foreign.check_file(file, MOST)
    text = file.read_text(encoding="utf-8")
    return foreign.typed(_Processor, foreign.read_object(file))["chat_template"] if OBJECT.match(text) else text


def _of_processor(target: TargetConfig) -> str | None:
    """Read the template of a multimodal target that stores it for its processor only, apart from the tokenizer."""
    try:
        found = cached_file(target.path, "chat_template.json", **source(target))
    except OSError:
        return None
    return None if found is None else _read(Path(found))


def _check_ends(render: Callable[[Any], object], size: int, where: str) -> None:
    """UserError if a rendering is killed at a limit. What it raises is ignored: real conversations will raise it again.

    It runs in a fork: a new Python would take seconds, and could not be given a tokenizer of foreign code. Python 3.12
    warns that locks of other threads stay held in a fork, but this one only renders text, and is killed if it waits.
    """
    if size > MOST:
        raise UserError(f"{where} has {size:,} characters, more than {MOST:,}: set another target.chat_template")
    child = get_context("fork").Process(target=_try, args=(render,))
    child.start()
    child.join(20 * SECONDS)
    child.kill()  # in case it waits for a lock
    child.join()
    if child.exitcode:
        bound = f"{SECONDS} s or {MEMORY >> 20:,} MiB"
        raise UserError(f"{where} takes more than {bound} to render a few words: set another target.chat_template")


def _try(render: Callable[[Any], object]) -> None:
    """Render in the separate process. The kernel can end it even inside a product that Python does not interrupt."""
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_CPU: SECONDS, resource.RLIMIT_AS: there + MEMORY, resource.RLIMIT_CORE: 0}
    for what, limit in limits.items():
        most = resource.getrlimit(what)[1]  # e.g. set by `ulimit -v`
        resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        for messages in TRIED:
            render(messages)
    except MemoryError:
        sys.exit(1)
    except Exception:
        sys.exit(0)
