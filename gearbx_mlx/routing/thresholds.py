"""Thresholds between gears: the paper's defaults, their file, and checks. calibration.py finds them on a text."""

import itertools
import json
import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from ..errors import GearbxError
from ..files.reading import Count, check_schema, parse_json, typed

LOW_BITS, HIGH_BITS = 1.8, 3.5  # GEARBX 3.3, for the reference vocabulary
REFERENCE_VOCABULARY = 32768
ROUTE = "route"
SCHEMA, VERSION = "gearbx-mlx thresholds", 1


def check_thresholds(thresholds: Sequence[float], gears: int) -> None:
    """Raises GearbxError unless there is one finite threshold between every two neighbouring gears, ascending."""
    shown = ", ".join(f"{t:g}" for t in thresholds)
    if len(thresholds) != gears - 1:
        raise GearbxError(f"{gears} gears need {gears - 1} thresholds, got {len(thresholds)} ({shown})")
    if not all(math.isfinite(t) for t in thresholds):
        raise GearbxError(f"thresholds must be finite numbers of bits, got {shown}")
    if any(a >= b for a, b in itertools.pairwise(thresholds)):
        raise GearbxError(f"thresholds must ascend with the gears, got {shown}")


def between(low: float, high: float, gears: int) -> tuple[float, ...]:
    """One threshold between any two neighbouring gears, spread evenly from `low` to `high` (two gears: `low` alone)."""
    return tuple(float(t) for t in np.linspace(low, high, max(gears - 1, 0)))


def default_thresholds(gears: int, vocab_size: int) -> tuple[float, ...]:
    """1.8 and 3.5 bits, scaled by log2 V / log2 32768 (GEARBX 3.4); longer ladders are spread between them."""
    scale = math.log2(vocab_size) / math.log2(REFERENCE_VOCABULARY)
    return between(LOW_BITS * scale, HIGH_BITS * scale, gears)


class ThresholdFile(Struct, frozen=True):
    """The file that `calibrate` writes and `generate --thresholds` reads.

    `thresholds` are in bits; `shares`, when known, is the share of the calibration tokens in each gear; `mode` is the
    decoding mode of the thresholds. In modes other than route they apply only to the `gears`, and to the model with
    the `fingerprint`, that they were found with.
    """

    thresholds: list[float]
    vocab_size: Count
    model: str
    method: str
    gears: list[Count]
    tokens: Count
    window: Count
    hysteresis: float
    min_gear_duration: Count
    shares: list[float] = []
    mode: str = ROUTE
    fingerprint: str = ""
    schema: str = SCHEMA
    version: int = VERSION

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def parse_thresholds(text: str) -> ThresholdFile:
    """A thresholds file from its text.

    Raises:
        GearbxError: not JSON, another schema or version, a field that is missing or of the wrong kind.
    """
    content = parse_json(text)
    check_schema(content, "a thresholds file", SCHEMA, VERSION)
    return typed(content, ThresholdFile)


def fitting(content: ThresholdFile, gears: Sequence[int], vocab_size: int, fingerprint: str) -> tuple[float, ...]:
    """The thresholds in bits, if they fit a ladder, a vocabulary and a model.

    Args:
        gears: bits.

    Raises:
        GearbxError: another vocabulary, another number of gears, thresholds out of order or not finite; in other modes
            than route, other gears or another model.
    """
    if content.vocab_size != vocab_size:
        raise GearbxError(f"made for a vocabulary of {content.vocab_size}, this model has {vocab_size}")
    if content.mode != ROUTE and content.fingerprint not in ("", fingerprint):
        raise GearbxError(f"made for another model ({content.model}), whose weights are not these")
    if content.mode != ROUTE and list(content.gears) != list(gears):
        shown, mine = (",".join(map(str, bits)) for bits in (gears, content.gears))
        raise GearbxError(f"made for gears {mine}, not {shown}")
    check_thresholds(content.thresholds, len(gears))
    return tuple(float(t) for t in content.thresholds)
