"""Checks, from the headers of its files, that a model fits into memory; warnings name settings that would fit."""

from typing import NamedTuple

from ..errors import GearbxError
from ..formats import get_format
from ..gears.cost import needed_memory
from ..gears.ladder import EXACT_FORMAT, EXACT_LADDER, Ladder
from ..kernels.dispatch import METAL
from ..settings import human_bytes
from .describe import Description

ONE_GEAR = (8, 6, 4)  # bits, in the order of quality


class StoredGears(NamedTuple):
    """Gears and their storage. why: the reason. note: a line for the user, or ""."""

    ladder: Ladder
    format: str
    manage: str
    group_size: int
    why: str
    note: str = ""

    def needs(self, model: Description, resident: bool) -> int:
        """Return the bytes that a model needs in these gears. resident: count idle gears too."""
        bits = [gear.bits for gear in self.ladder]
        return needed_memory(model.files, bits, get_format(self.format), self.group_size, resident)


def check_limit(model: Description, stored: StoredGears, limit: int | None) -> None:
    """Validate that a memory limit in bytes has room for the largest gear."""
    needed = 0 if limit is None else stored.needs(model, False)
    if limit is not None and needed > limit:
        raise GearbxError(
            f"--residency disk:{human_bytes(limit)}: too small for the largest gear of {model.title}, got about "
            f"{human_bytes(needed)}; use a larger size, or fewer --gears"
        )


def room_warnings(model: Description, stored: StoredGears, residency: str, drafts: bool) -> list[str]:
    """Return warnings about a model that does not fit, with settings that would.

    Args:
        drafts: True if the low gear drafts, and no flag requested these gears.

    Raises:
        GearbxError: a Mac has less memory than the model, or recommends less than the largest gear takes.
    """
    if residency == "stream":
        return []
    machine, found = model.machine, list[str]()
    # All of an original or quantized checkpoint is read.
    minimum = model.size if model.saved is None else stored.needs(model, False)
    if minimum > machine.whole:
        sizes = f"{model.title}: {human_bytes(minimum)} of weights exceed this machine's {human_bytes(machine.whole)}"
        if machine.device == METAL:
            raise GearbxError(f"{sizes} of memory; use a checkpoint in fewer bits, or a smaller model")
        found.append(f"{sizes} of memory: expect it to be slow, or ended by the system")
    limit, resident = machine.recommended, residency == "resident"
    if limit is None or (needed := stored.needs(model, resident)) <= limit:
        return found
    choices: dict[str, int] = {}
    if model.original and (drafts or len(stored.ladder) == 1):
        choices = in_one_copy(model, stored)
    elif model.codes is None:
        choices = with_less(model, stored, limit, resident)
    fitting = [f"{name} ({human_bytes(size)})" if size else name for name, size in choices.items() if size <= limit]
    problem = memory_problem(model.title, needed, limit)
    if machine.device == METAL and stored.needs(model, False) > limit:
        raise GearbxError(f"{problem}; use {' or '.join(fitting) or 'a smaller model'}")
    remedy = f"use {' or '.join(fitting)}" if fitting else "expect it to be slow"
    return [*found, f"{problem}; {remedy}"]


def in_one_copy(model: Description, stored: StoredGears) -> dict[str, int]:
    """Return settings with one copy of a model's weights, and the bytes of each."""
    choices = {"--gears 16": ("planes", "16")}
    if all(entry.dtype == "BF16" for entry in model.files.matrices.values()):
        choices["--format exact"] = (EXACT_FORMAT, EXACT_LADDER)
    choices |= {f"--mode static --gears {bits}": ("planes", str(bits)) for bits in ONE_GEAR}
    return {
        name: stored._replace(format=format, ladder=Ladder.parse(gears)).needs(model, True)
        for name, (format, gears) in choices.items()
    }


def with_less(model: Description, stored: StoredGears, limit: int, resident: bool) -> dict[str, int]:
    """Return the most gears that fit, lowest first, and `--residency disk` (as 0 bytes) if one gear fits."""
    choices: dict[str, int] = {}
    if get_format(stored.format).ladders and model.saved is None:
        return choices
    for count in range(len(stored.ladder) - 1, 0, -1):
        fewer = stored._replace(ladder=Ladder([gear.bits for gear in stored.ladder][:count]))
        needed = fewer.needs(model, resident)
        if needed <= limit:
            choices[f"--gears {fewer.ladder}"] = needed
            break
    if resident and stored.needs(model, False) <= limit:
        choices["--residency disk"] = 0
    return choices


def memory_problem(model: str, needed: int, limit: int) -> str:
    """Return the problem of a model that needs more bytes than a GPU recommends."""
    return f"{model}: about {human_bytes(needed)} exceed the {human_bytes(limit)} recommended for this GPU"
