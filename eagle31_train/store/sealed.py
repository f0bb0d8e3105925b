"""JSON that knows whether it is whole: an object whose last entry is a checksum of the others."""

import json
from typing import Any

import xxhash

from eagle31_train.common import foreign

CHECK = "check"


class DamagedError(ValueError):
    """A file is not what was written; says why."""


def seal(value: dict[str, Any], indent: int | None = None) -> bytes:
    """A JSON object as bytes, with a checksum of itself; one line, or indented for people."""
    return (json.dumps({**value, CHECK: _check(value)}, indent=indent, ensure_ascii=False) + "\n").encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The object without its checksum; DamagedError if it is torn, altered, or was never sealed."""
    try:
        value = foreign.parse_json(data)
        if not isinstance(value, dict) or CHECK not in value:
            raise ValueError("it carries no checksum of itself")
        if value.pop(CHECK) != _check(value):
            raise ValueError("its checksum does not match")
    except ValueError as error:  # of JSON or of UTF-8, too
        raise DamagedError(str(error)) from None
    # Blanks and line ends, which the checksum cannot see. Indented text of 10^7 samples' plan takes 10 s and 1 GiB.
    if data != seal(value) and data != seal(value, indent=2):
        raise DamagedError("it is not as it was written, though its values are")
    return value


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _check(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode())
