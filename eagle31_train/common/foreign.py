"""Reading what others made (files of the hub, answers of a server, rows of data) within bounds of size, depth and type.

Everything here raises ValueError or OSError, with a text to be put after the name of what was read. The caller, which
knows what to do about it, makes a UserError.
"""

import json
import stat
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from safetensors import SafetensorError
from typing_extensions import NotRequired, TypedDict

MOST = 1 << 28  # bytes of a JSON file: indices and tokenizers have a tenth
TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # files that libraries read whole
DEEPEST = 100  # nested objects and lists: no format in use has more than a dozen; Python gives up at 1000

# What safetensors raises for a file that is damaged, or that describes impossible tensors (TypeError: of 2⁶³ rows).
NO_TENSORS = (SafetensorError, RuntimeError, ValueError, TypeError, IndexError, KeyError)

# The types of fields, with bounds that nothing real exceeds: what is allocated by such a number stays small.
Count = Annotated[int, Field(ge=0, le=1 << 16)]  # layers, heads, experts, labels
Width = Annotated[int, Field(ge=0, le=1 << 24)]  # hidden sizes; tokens of a vocabulary
Number = Annotated[float, Field(allow_inf_nan=False)]
Positions = Annotated[int, Field(ge=0, le=1 << 40)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Theta = Annotated[float, Field(gt=0, le=1e30)]  # the base of RoPE
# RoPE's scaling; its values are checked by its kind (`model.rope`).
Scaling = dict[str, str | bool | Annotated[int, Field(le=1 << 53)] | Number | list[Number | int] | None]


def check_file(path: Path, most: int | None = MOST) -> None:
    """Raise OSError or ValueError unless it is a regular file (a pipe would block) of at most `most` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"it has {status.st_size:,} bytes, more than the limit of {most:,}")


def check_folder(folder: Path) -> None:
    """Raise ValueError, naming the first bad entry, unless all are folders or regular files, texts up to MOST bytes."""
    for path in sorted(folder.iterdir()):
        try:
            if not path.is_dir():
                check_file(path, MOST if path.suffix in TEXTS else None)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path.name}: {getattr(error, 'strerror', None) or error}") from None


def parse_json(data: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text. ValueError if it is not JSON, or if it is nested more than DEEPEST deep."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    opened = data.count("[") + data.count("{") if isinstance(data, str) else data.count(b"[") + data.count(b"{")
    if opened > DEEPEST:  # seldom: most rows need no walk
        check_depth(value)
    return value


def check_depth(value: Any, most: int = DEEPEST) -> None:
    """Raise ValueError if lists and dicts are nested more than `most` deep."""
    layer, depth = [value], 0
    while layer := [i for v in layer if isinstance(v, dict | list) for i in (v.values() if isinstance(v, dict) else v)]:
        depth += 1
        if depth > most:
            raise ValueError(f"it is nested more than {most} deep")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. ValueError if it is too large or holds none, OSError if it is missing."""
    check_file(path)
    value = parse_json(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")  # noqa: TRY004 (of the file)
    return value


def typed(kind: Any, value: Any) -> Any:
    """Check that a value is of a type, and return it. A dataclass is made from an object with its fields and no others.

    ValueError, naming the first field that is missing or of another type."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    make: Any = kind  # from the value as it was: 5 among floats stays 5
    return make(**value) if is_dataclass(kind) else value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if not is_dataclass(kind):
        return TypeAdapter(kind)
    hints = get_type_hints(kind, include_extras=True)
    optional = {field.name for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)}
    entries = {name: NotRequired[hint] if name in optional else hint for name, hint in hints.items()}
    make: Any = TypedDict  # mypy does not know fields made at run time
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(make("fields", entries)))
