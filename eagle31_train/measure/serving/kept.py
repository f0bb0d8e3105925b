"""What servers answered, on the disk: a file for each server, read back where the same would be asked of the same.

A very large target takes an hour to start, so a server that fails, or a drafter that is added, costs no other's time.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.measure.serving.command import server_arguments
from eagle31_train.measure.serving.engine import Engine
from eagle31_train.measure.serving.load import Answer, Question
from eagle31_train.schema import Config

LAYOUT = 1  # raise it when the same server is asked or counted otherwise


@dataclass(frozen=True)
class Served:
    """What one server did: answers, and what vLLM counted meanwhile, by concurrency."""

    answers: dict[int, list[Answer]]
    counted: dict[int, Counter[str]]


def fingerprint(
    config: Config, drafter: Path | None, draft_tokens: int, sent: Mapping[int, Sequence[Question]], engine: Engine
) -> str:
    """What tells a server and its questions from others: weights by what they hold, and not by where they lie."""
    arguments = server_arguments(config, drafter, draft_tokens, 0)
    if drafter is not None:
        arguments["speculative_config"]["model"] = artifacts.weights_fingerprint(str(drafter))
    told = {
        "layout": LAYOUT,
        "arguments": arguments,  # whose port is none
        "target": artifacts.weights_fingerprint(config.target.path),
        "sent": {str(users): [asdict(question) for question in asked] for users, asked in sent.items()},
        "warmup": config.evaluate.warmup,
        "engine": asdict(engine),
    }
    return artifacts.fingerprint(told)


def place(folder: Path, draft_tokens: int, key: str) -> Path:
    """The file of a server; a drafter may be called otherwise beside others, so its name is no part of it."""
    return folder / f"server-{draft_tokens}-{key}.json"


def write(file: Path, drafter: str | None, served: Served) -> None:
    """Keep what a server did, whole or not at all."""
    plain: dict[str, Any] = {
        "answers": {str(users): [asdict(answer) for answer in answers] for users, answers in served.answers.items()},
        "counted": {str(users): dict(counted) for users, counted in served.counted.items()},
    }
    artifacts.write_json(file, {"drafter": drafter, "sum": artifacts.fingerprint(plain), "served": plain})


def read(file: Path) -> Served | None:
    """What a server did; None where nothing was kept, or not whole, which is told."""
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        plain = record["served"]
        if artifacts.fingerprint(plain) != record["sum"]:
            raise ValueError("its checksum is another")
        return Served(
            {int(users): [Answer(**answer) for answer in answers] for users, answers in plain["answers"].items()},
            {int(users): Counter(counted) for users, counted in plain["counted"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"{file} is not as it was written ({error}): this server is measured anew")
        return None
