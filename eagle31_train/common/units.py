"""Sizes and times as people write them."""

import re

from eagle31_train.common.errors import UserError


def byte_count(text: str, option: str) -> int:
    """Parse a number of bytes from "200GB", "64GiB", "1.5TB" or a plain number. `option` is for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UserError(f"{option}={text} is not a size in bytes: write it like 200GB, 64GiB or 1000000")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_limit(text: str | None) -> float | None:
    """Parse seconds from "3h50m", "90m", "30s" or "2d"; None is no limit. UserError if it is no such time."""
    if text is None:
        return None
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", ""))
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups()) if parts else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise UserError(f"train.time_limit={text} is not a duration: write it like 3h50m, 90m or 30s")
    return float(total)
