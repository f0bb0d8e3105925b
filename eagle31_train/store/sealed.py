"""JSON that can tell whether it is intact: an object whose last entry is a checksum of the others."""

import json
from typing import Any

import xxhash

from eagle31_train.common import foreign

CHECK = "check"


class DamagedError(ValueError):
    """A file is not what was written; the text says why."""


def seal(value: dict[str, Any], indent: int | None = None) -> bytes:
    """Return a JSON object as bytes, with a checksum of itself; on one line, or indented for people."""
    return (json.dumps({**value, CHECK: _check(value)}, indent=indent, ensure_ascii=False) + "\n").encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Return the object without its checksum. DamagedError if it is torn, altered, or was never sealed."""
    try:
        value = foreign.parse_json(data)
        if not isinstance(value, dict) or CHECK not in value:
            raise ValueError("it has no checksum of its own")
        if value.pop(CHECK) != _check(value):
            raise ValueError("its checksum does not match")
    except ValueError as error:  # also for broken JSON or UTF-8
        raise DamagedError(str(error)) from None
    # Compare white space, which the checksum does not cover. One line first: to indent a plan of 10^7 samples takes
    # 10 s and 1 GiB.
    if data != seal(value) and data != seal(value, indent=2):
        raise DamagedError("its white space has changed since it was written")
    return value


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _check(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode())
