"""What the evaluation decodes: prompts of the held-out split, or of a file, as token ids, evenly of every source."""

import glob
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from datasets import DatasetDict
from transformers import AutoTokenizer

from eagle31_train.schema import TargetConfig, UserError


@dataclass(frozen=True)
class Prompt:
    """Token ids up to and with the generation prompt."""

    id: str
    source: str
    ids: list[int]


def choose(prompts: list[Prompt], count: int, longest: int) -> tuple[list[Prompt], list[str]]:
    """`count` distinct prompts of at most `longest` tokens, in turns of every source, in its order; also the ids of
    those passed over as longer.

    A source that runs out leaves its turns to the others.

    Raises:
        UserError: none is left.
    """
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    waiting = deque(iter(by_source[source]) for source in sorted(by_source))
    chosen: dict[tuple[int, ...], Prompt] = {}
    too_long: list[str] = []
    while waiting and len(chosen) < count:
        source = waiting.popleft()
        for prompt in source:
            if len(prompt.ids) > longest:
                too_long.append(prompt.id)
            elif tuple(prompt.ids) not in chosen:
                chosen[tuple(prompt.ids)] = prompt
                waiting.append(source)
                break
    if not chosen:
        raise UserError(
            f"none of {len(prompts)} prompts has at most {longest} tokens, which is what target and drafter leave "
            "beside evaluate.max_new_tokens: lower that"
        )
    return list(chosen.values()), too_long


def from_heldout(dataset: Path) -> list[Prompt]:
    """Of every held-out conversation what stands before the assistant's first word, in the split's order."""
    rows = DatasetDict.load_from_disk(str(dataset))["heldout"]
    return [Prompt(r["id"], r["source"], r["input_ids"][: r["loss_mask"].index(True)]) for r in rows]


def files_of(pattern: str) -> list[Path]:
    """The files that evaluate.prompts names."""
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 (absolute patterns)
    if not files:
        raise UserError(
            f"evaluate.prompts={pattern} is no file: give JSONL with prompt, turns or messages in each line"
        )
    return files


def from_files(files: list[Path], target: TargetConfig) -> list[Prompt]:
    """Prompts of JSONL files, rendered with the target's chat template, its arguments and the row's tools.

    Raises:
        UserError: a line without a prompt, named by number, or a target without a template.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            target.path, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer of target.path={target.path} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    template = Path(target.chat_template).read_text(encoding="utf-8") if target.chat_template else None
    if template is None and not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {target.path} has no chat template: give one as target.chat_template=FILE")
    prompts = []
    for file in files:
        # Not splitlines, which ends a line at U+2028 too: JSON may hold it, and text from the web does.
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            row, messages = _read(line, f"{file}, line {number}")
            try:
                text = tokenizer.apply_chat_template(
                    messages,
                    tools=row.get("tools") or None,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **target.template_args,
                )
            except jinja2.TemplateError as error:
                raise UserError(f"{file}, line {number}: the chat template refuses it ({error}): change it") from None
            ids = tokenizer.encode(text, add_special_tokens=False)
            name = row.get("id", row.get("question_id", f"{file.stem}-{number}"))
            prompts.append(Prompt(str(name), str(row.get("source", row.get("category", file.stem))), ids))
    return prompts


def _read(line: str, where: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """A JSONL line and the messages before its first answer."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error}): mend or remove it") from None
    if isinstance(row, dict) and not isinstance(row.get("tools") or [], list):
        raise UserError(f"{where} has tools that are no list: give OpenAI's form of tools")
    match row:
        case {"prompt": str(text)} | {"turns": [str(text), *_]}:
            return row, [{"role": "user", "content": text}]
        case {"messages": [_, *_] as messages}:
            return row, _before_answer(messages, where)
    raise UserError(f"{where} has no prompt: give prompt (a text), turns (texts) or messages (role, content)")


def _before_answer(messages: list[Any], where: str) -> list[dict[str, str]]:
    kept = []
    for message in messages:
        match message:
            case {"role": "assistant"}:
                break
            case {"role": str(role), "content": str(content)}:
                kept.append({"role": role, "content": content})
            case _:
                raise UserError(f"{where} has a message without role or content text: mend or remove it")
    if not kept:
        raise UserError(f"{where} begins with the assistant: there is nothing to answer")
    return kept
