"""What is known of a model before a weight is read: config.json, the headers of its files, what stands beside them.

And of the machine: what MLX computes on, its memory, and whether there are native kernels. `decide` asks no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..bit_selection.precision import PrecisionManifest, read_precision
from ..errors import error_context
from ..gears.cost import ModelFiles, read_files
from ..gears.in_place import Codes, codes_in
from ..gears.manifest import PRECISION, Manifest
from ..kernels.device import available_memory, recommended_memory, whole_memory
from ..kernels.dispatch import CPU, choose, device
from ..loading import DEMO_MODEL, check_model, find, model_name, read_config
from ..ranks.place import current
from .flags import GearedSettings
from .terminal import show_compiling


@dataclass(frozen=True)
class Machine:
    """Where a model is to run.

    device: what MLX computes on. available: bytes of memory that new programs can use. whole: bytes that there are.
    recommended: bytes that a program should have on this GPU; None on others. ranked: whether ranks share the model.
    no_kernels: why gears cannot run on native kernels of the CPU; "" where they can, or where nobody asks.
    """

    device: str
    available: int
    whole: int
    recommended: int | None = None
    ranked: bool = False
    no_kernels: str = ""

    @property
    def native_kernels(self) -> bool:
        return not self.no_kernels


@dataclass(frozen=True)
class Description:
    """A model's files, and the machine.

    name: as given; None: the model that ships. directory: where it is. files: what the headers say. precision: the
    manifest that a flag names; else, where a controller is asked for, the one beside the gears of a checkpoint.
    """

    name: str | None
    directory: Path
    config: Mapping[str, Any]
    files: ModelFiles
    machine: Machine
    precision: PrecisionManifest | None = None

    @property
    def title(self) -> str:
        """What to call the model."""
        return model_name(self.name)

    @property
    def saved(self) -> Manifest | None:
        """The gears of the checkpoint, if it is a geared one."""
        return self.files.manifest

    @cached_property
    def codes(self) -> Codes | None:
        """The codes of the checkpoint, if it is quantized."""
        return None if self.saved is not None else codes_in(self.config, self.files.arrays)

    @property
    def gearless(self) -> bool:
        """True if no layer can change gear: ranks divide codes whole."""
        return self.codes is not None and self.machine.ranked

    @property
    def original(self) -> bool:
        """True if gears are made of the weights."""
        return self.saved is None and self.codes is None

    @property
    def dtype(self) -> str:
        """The floating type of most weights, as headers name it."""
        return self.files.dtype

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return self.files.total

    @property
    def architecture(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def vocabulary(self) -> int | None:
        """Length of the logits, if config.json says so."""
        text = self.config.get("text_config")
        found = self.config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
        return found if isinstance(found, int) else None


def describe(settings: GearedSettings) -> Description:
    """Describe the model that settings name, and this machine. A Hub repository is downloaded; no weight is read.

    Raises:
        GearbxError: no such model, files that are damaged or do not belong together, code that is not trusted.
    """
    model = settings.model
    directory = find(model.model or DEMO_MODEL)
    check_model(directory, model.trust_remote_code, {})
    files = read_files(directory)
    described = Description(model.model, directory, read_config(directory), files, machine_for(settings))
    return replace(described, precision=precision_of(settings, described))


def machine_for(settings: GearedSettings) -> Machine:
    """Describe this machine. Kernels are compiled where nobody asked for gears, which then depend on them."""
    on, flag, no_kernels = device(), settings.gears.kernels, ""
    if on == CPU and settings.layout.gears is None:
        show_compiling()
        choice = choose(flag.of_gearbox["kernels"], flag.activations)
        no_kernels = "" if choice.native else choice.reason
    ranked = current() is not None
    return Machine(on, available_memory(), whole_memory(), recommended_memory(), ranked, no_kernels)


def precision_of(settings: GearedSettings, described: Description) -> PrecisionManifest | None:
    """Return the manifest that is named; else, where a controller is asked for, the one that lies beside saved gears.

    Raises:
        GearbxError: a file that cannot be read, or is another model's.
    """
    given, saved = settings.gears.manifest, described.saved
    if saved is None:
        return None if given is None else read_precision(Path(given))
    controlled = settings.gears.residency.limit is not None or settings.controller.target_tps is not None
    file = Path(given) if given is not None else described.directory / PRECISION
    if given is None and not (controlled and file.exists()):
        return None
    precision = read_precision(file)
    with error_context(file):
        precision.check_model(saved.fingerprint)
    return precision
