"""The journal of a conversion: its plan, and a line for each parameter that is done."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from ..files.reading import Count, json_lines, read_text
from ..gears.discovery import Predicate, with_bits, with_clamps
from ..gears.fingerprint import SAMPLED
from ..gears.ladder import DENSE
from ..gears.names import EMBEDDINGS
from ..gears.original import View
from ..gears.tensor_entries import Entry
from ..gears.values import DtypeName, GroupSize, Hash, Width

JOURNAL = "conversion.jsonl"  # the plan, and a line for each parameter that is done
REMOVE = "remove the directory, and the same command begins anew"


class Plan(Struct, frozen=True):
    """What to make, as `Gearbox` takes it. source: the hashes of the model's files, by name."""

    format: str
    gears: tuple[Width, ...]
    manage: str
    group_size: GroupSize
    dtype: DtypeName | None
    source: Mapping[str, str]
    wish: Mapping[str, Any] | None = None  # floors or a budget, which the bits of every layer follow from
    bits: Mapping[str, Width] | None = None  # path to the fewest bits that a layer may have
    clamps: Mapping[str, float] | None = None  # path to the largest magnitude of a weight in a quantized gear
    embeddings: str = EMBEDDINGS[1]  # what conversions did before there was a choice

    @property
    def managed(self) -> str | Predicate:
        """The argument `manage` of `Gearbox`."""
        manage = self.manage if self.bits is None else with_bits(self.bits)
        return with_clamps(manage, self.clamps) if self.clamps else manage


class Unit(Struct, frozen=True):
    """A line of the journal after the first, which has the plan: a parameter that is done.

    unit, shape, dtype: its name, shape and type. sample: bits of the float32 values that the fingerprint takes.
    base, gears: the arrays that were written, by name. hashes: of their bytes. names: of a managed layer, as in
    `SavedLayer.gears`. stock_bits: those of the layer in the base, where mlx-lm runs it quantized. rows: as in
    `SavedLayer`. larger: why the layer stays dense, if it would become larger. views: hash to what it shows of the
    parameter, where the original is to come back.
    """

    unit: str
    shape: tuple[Count, ...]
    dtype: str
    sample: Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=SAMPLED)]
    base: Mapping[str, Entry]
    gears: Mapping[str, Entry]
    hashes: Mapping[str, Hash]
    names: Mapping[Width, Mapping[str, str]] = {}
    stock_bits: Width | None = None
    rows: Width = DENSE
    larger: str | None = None
    views: Mapping[Hash, View] = {}


def read_journal(work: Path) -> tuple[Plan | None, dict[str, Unit], int]:
    """The plan of a conversion that was begun in a directory, the parameters that are done, and bytes of whole lines.

    Raises:
        GearbxError: a line that is damaged.
    """
    file = work / JOURNAL
    text = read_text(file, "the journal of a conversion", REMOVE) if os.path.lexists(file) else ""
    complete = text[: text.rfind("\n") + 1]
    head, _, rest = complete.partition("\n")
    plan = next((plan for _, plan in json_lines(file, head, Plan, REMOVE)), None)
    units = (unit for _, unit in json_lines(file, rest, Unit, REMOVE, first=2))
    return plan, {unit.unit: unit for unit in units}, len(complete.encode())


def is_begun(work: Path) -> bool:
    """Whether a conversion in a directory has done something that another run need not do again."""
    plan, done, _ = read_journal(work)
    return bool(done) or (plan is not None and plan.bits is not None)
