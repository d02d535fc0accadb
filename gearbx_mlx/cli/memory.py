"""Whether a model fits into memory, known from the headers of its files, and what would fit in its place."""

from typing import NamedTuple

from ..errors import GearbxError
from ..formats import get_format
from ..gears.cost import needed_memory
from ..gears.ladder import EXACT_FORMAT, EXACT_LADDER, Ladder
from ..kernels.dispatch import METAL
from ..settings import human_bytes
from .describe import Description


class StoredGears(NamedTuple):
    """The gears and how they are stored; why, and what a user should know of it."""

    ladder: Ladder
    format: str
    manage: str
    group_size: int
    why: str
    note: str = ""

    def needs(self, model: Description, resident: bool) -> int:
        """Return the bytes that a model needs in these gears, idle ones with it or not."""
        bits = [gear.bits for gear in self.ladder]
        return needed_memory(model.files, bits, get_format(self.format), self.group_size, resident)


def check_limit(model: Description, stored: StoredGears, limit: int | None) -> None:
    """Validate a limit of memory. Raises GearbxError for less than one gear takes."""
    needed = 0 if limit is None else stored.needs(model, False)
    if limit is not None and needed > limit:
        raise GearbxError(
            f"--residency disk:{human_bytes(limit)}: {model.title} takes about {human_bytes(needed)} in its "
            "largest gear alone; give more, or fewer --gears"
        )


def room_warnings(model: Description, stored: StoredGears, residency: str, drafts: bool) -> list[str]:
    """Return warnings of a model that does not fit, which name what would fit.

    Args:
        drafts: nobody asked for these gears, of which the low one drafts.

    Raises:
        GearbxError: a Mac has less memory than the model.
    """
    if residency == "stream":
        return []
    machine, found = model.machine, []
    # Of an original or quantized checkpoint all is read.
    least = model.size if model.saved is None else stored.needs(model, False)
    if least > machine.whole:
        sizes = f"{model.title}: has {human_bytes(least)} of weights, and this machine {human_bytes(machine.whole)}"
        if machine.device == METAL:
            raise GearbxError(f"{sizes} of memory; give a checkpoint in fewer bits, or a smaller model")
        found.append(f"{sizes} of memory: expect it to be slow, or ended by the system")
    most, resident = machine.recommended, residency == "resident"
    if most is None or (needed := stored.needs(model, resident)) <= most:
        return found
    ways: dict[str, int] = {}
    if drafts and model.original:
        ways = without_draft(model, stored)
    elif model.codes is None:
        ways = with_less(model, stored, most, resident)
    fitting = " or ".join(f"{way} ({human_bytes(size)})" if size else way for way, size in ways.items() if size <= most)
    return [*found, beyond(model.title, needed, most, f"{fitting} would fit" if fitting else "expect it to be slow")]


def without_draft(model: Description, stored: StoredGears) -> dict[str, int]:
    """Return other ways to run a model that a draft beside it makes too large, and the bytes that each takes."""
    ways = {"--gears 16": ("planes", "16"), "--mode static --gears 8": ("planes", "8")}
    if all(entry.dtype == "BF16" for entry in model.files.matrices.values()):
        ways["--format exact"] = (EXACT_FORMAT, EXACT_LADDER)
    ways["a checkpoint in 4 bits"] = ("planes", "4")
    return {
        way: stored._replace(format=format, ladder=Ladder.parse(gears)).needs(model, True)
        for way, (format, gears) in ways.items()
    }


def with_less(model: Description, stored: StoredGears, most: int, resident: bool) -> dict[str, int]:
    """Return the most gears that fit, from the lowest on, and the residency that has one gear in memory (0 bytes)."""
    ways: dict[str, int] = {}
    if get_format(stored.format).ladders and model.saved is None:
        return ways
    for count in range(len(stored.ladder) - 1, 0, -1):
        fewer = stored._replace(ladder=Ladder([gear.bits for gear in stored.ladder][:count]))
        needed = fewer.needs(model, resident)
        if needed <= most:
            ways[f"--gears {fewer.ladder}"] = needed
            break
    if resident and stored.needs(model, False) <= most:
        ways["--residency disk"] = 0
    return ways


def beyond(what: str, needed: int, most: int, advice: str) -> str:
    """Return the warning of what needs more memory than a GPU should have."""
    sizes = f"needs about {human_bytes(needed)}, and this GPU should have at most {human_bytes(most)}"
    return f"{what} {sizes}: {advice}"
