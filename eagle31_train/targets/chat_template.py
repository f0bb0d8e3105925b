"""A chat template is a program of its author's: how it is read, and that it ends.

Jinja's sandbox, in which transformers renders it, keeps it from files and from Python; nothing keeps it from a loop
without end or a product of gigabytes. So it is tried once in a process of its own, with bounds, before any other use.
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
MOST = 1 << 20  # bytes of a template: the longest in use have some 30,000
SECONDS, MEMORY = 10, 1 << 30  # of one rendering of TRIED: bounds a thousand times what templates take
TRIED: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": role, "content": "Hello"} for role in ("system", "user", "assistant", "user")],
]


class _Processor(TypedDict):
    chat_template: str


def templates_of(target: TargetConfig, tokenizer: Any) -> dict[str, str]:
    """A target's templates by name, `default` and perhaps `tool_use`: target.chat_template, or its tokenizer's own.
    UserError if there is none, it is no template, or it takes too much to render a word."""
    try:
        if target.chat_template is not None:
            where = f"target.chat_template={target.chat_template}"
            named = {"default": _read(Path(target.chat_template))}
        else:
            where = f"the chat template of {target.path}"
            own = tokenizer.chat_template or _of_processor(target)
            named = foreign.typed(dict[str, str], own if isinstance(own, dict) else {"default": own or ""})
    except FileNotFoundError:
        raise UserError(f"{where} is missing: give a Jinja file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read ({error}): give a Jinja file as target.chat_template") from None
    if not named.get("default"):
        raise UserError(f"the tokenizer of {target.path} has no chat template: give one as target.chat_template=FILE")
    options = {"tokenize": False, "add_generation_prompt": True, **target.template_args}
    for text in named.values():
        render = partial(tokenizer.apply_chat_template, chat_template=text, **options)
        _check_ends(render, len(text), where)
    return named


def _read(file: Path) -> str:
    """The template in a file of Jinja, or in a processor's chat_template.json."""
    foreign.check_file(file, MOST)
    text = file.read_text(encoding="utf-8")
    return foreign.typed(_Processor, foreign.read_object(file))["chat_template"] if OBJECT.match(text) else text


def _of_processor(target: TargetConfig) -> str | None:
    """The template of a multimodal target whose files keep it apart from its tokenizer's, for the processor alone."""
    try:
        found = cached_file(target.path, "chat_template.json", **source(target))
    except OSError:
        return None
    return None if found is None else _read(Path(found))


def _check_ends(render: Callable[[Any], object], size: int, where: str) -> None:
    """Refuse a rendering that is killed at a bound; what it raises, real conversations will raise where they are.

    In a fork, since another Python would take seconds, and could not be given a tokenizer of foreign code. Python 3.12
    warns that what other threads hold stays held there: but it renders text alone, and is killed if it waits for them.
    """
    if size > MOST:
        raise UserError(f"{where} has {size:,} letters, and at most {MOST:,} are read: give another")
    child = get_context("fork").Process(target=_try, args=(render,))
    child.start()
    child.join(20 * SECONDS)
    child.kill()  # where it waits
    child.join()
    if child.exitcode:
        bound = f"{SECONDS} s or {MEMORY >> 20:,} MiB"
        raise UserError(f"{where} takes more than {bound} to render a few words: give another target.chat_template")


def _try(render: Callable[[Any], object]) -> None:
    """The process of its own. The kernel ends it, even amid a product that Python does not leave."""
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_CPU: SECONDS, resource.RLIMIT_AS: there + MEMORY, resource.RLIMIT_CORE: 0}
    for what, limit in limits.items():
        most = resource.getrlimit(what)[1]  # as by `ulimit -v`
        resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        for messages in TRIED:
            render(messages)
    except MemoryError:
        sys.exit(1)
    except Exception:
        sys.exit(0)
