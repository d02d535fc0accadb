"""Sizes in bytes, as people write them."""

import math
import re

from ..errors import GearbxError

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of "3GB", "3 GiB", "500M" or "1e9".

    Raises:
        GearbxError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e"))
    try:
        count = float(found[1]) * UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise GearbxError(f"'{text}' is no size; give bytes such as 3GB, 500MB or 2GiB")
    return round(count)


def human_bytes(count: float) -> str:
    """1234567 -> 1.23 MB, in powers of ten as mlx-lm reports memory."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
