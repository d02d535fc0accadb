"""A warning, before a model is loaded, that its gears will not fit what the GPU should have in memory."""

import dataclasses
import warnings

from ..errors import GearbxError, GearbxWarning
from ..formats import get_format
from ..gears.cost import ModelFiles, needed_memory, read_files
from ..gears.ladder import WHOLE, WHOLE_LADDER, Ladder
from ..kernels.device import recommended_memory
from ..loading import DEMO_MODEL, find, model_name
from .gears import GearSettings
from .sizes import human_bytes


def warn_of_memory(model: str | None, gears: GearSettings, whole: bool = False) -> None:
    """Warn of a model that needs more memory than macOS recommends for the GPU, and name gears that would fit.

    Args:
        model: as `load` takes it.
        whole: whether a model of bfloat16 gets format exact, as mode lossless does.
    """
    most = recommended_memory()
    if most is None or gears.ladder is None or gears.residency == "stream":
        return
    files = files_of(model)
    if files is None:
        return
    if whole and all(entry.dtype == "BF16" for entry in files.matrices.values()):
        gears = dataclasses.replace(gears, format=WHOLE, ladder=Ladder.parse(WHOLE_LADDER))
    needed = memory_with(files, gears)
    if needed > most:
        remedies = [] if files.is_quantized else fitting(files, gears, most)
        advice = f"{' or '.join(remedies)} would fit" if remedies else "expect it to be slow"
        warn(model_name(model), needed, most, advice)


def warn_of_pair(small: str, large: str | None) -> None:
    """As `warn_of_memory`, of two models that are in memory together."""
    most = recommended_memory()
    found = [] if most is None else [files_of(small), files_of(large)]
    needed = sum(files.total for files in found if files is not None)
    if most is not None and needed > most:
        warn(f"the pair of {small} and {model_name(large)}", needed, most, "give quantized models")


def warn(what: str, needed: int, most: int, advice: str) -> None:
    sizes = f"needs about {human_bytes(needed)}, and this GPU should have at most {human_bytes(most)}"
    warnings.warn(f"{what} {sizes}: {advice}", GearbxWarning, stacklevel=3)


def files_of(model: str | None) -> ModelFiles | None:
    """What the headers of a model's files say; None where they cannot be read: `load` says what is wrong with them."""
    try:
        return read_files(find(model or DEMO_MODEL))
    except (GearbxError, OSError):
        return None


def memory_with(files: ModelFiles, gears: GearSettings) -> int:
    """Bytes that a model in these gears needs."""
    bits = [gear.bits for gear in gears.gears]
    return needed_memory(files, bits, get_format(gears.format), gears.group_size, gears.residency == "resident")


def fitting(files: ModelFiles, gears: GearSettings, most: int) -> list[str]:
    """Changes that make it fit: the most gears from the lowest on, and the residency that has one gear in memory."""
    found = []
    bits = [gear.bits for gear in gears.gears]
    can_drop = not get_format(gears.format).ladders or files.manifest is not None
    for count in range(len(bits) - 1, 0, -1) if can_drop else ():
        fewer = dataclasses.replace(gears, ladder=Ladder(bits[:count]))
        needed = memory_with(files, fewer)
        if needed <= most:
            found.append(f"--gears {fewer.ladder} ({human_bytes(needed)})")
            break
    one = dataclasses.replace(gears, residency="disk")
    if gears.residency == "resident" and can_drop and memory_with(files, one) <= most:
        found.append("--residency disk")
    return found
