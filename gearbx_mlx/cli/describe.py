"""Description of a model and this machine, before a weight is read: the only inputs of `decide` besides flags.

The model's part is config.json, the headers of its files and files beside them. The machine's part is device, memory
and native kernels.
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
    """The machine that runs a model.

    Attributes:
        device: MLX's device.
        available: bytes of memory for new programs.
        whole: bytes of memory.
        recommended: maximum bytes of a program on this GPU; None on a CPU.
        ranked: True if ranks share the model.
        no_kernels: the reason against native CPU kernels; "" if they run, or do not matter.
    """

    device: str
    available: int
    whole: int
    recommended: int | None = None
    ranked: bool = False
    no_kernels: str = ""


@dataclass(frozen=True)
class Description:
    """The files of a model, and the machine.

    Attributes:
        name: as typed; None for the bundled model.
        directory: its place.
        files: contents of the headers.
        precision: the manifest of --manifest, or a geared checkpoint's if there is a controller.
    """

    name: str | None
    directory: Path
    config: Mapping[str, Any]
    files: ModelFiles
    machine: Machine
    precision: PrecisionManifest | None = None

    @property
    def title(self) -> str:
        """The name of the model in messages."""
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
        """Absence of layers that can change gear: ranks divide codes whole."""
        return self.codes is not None and self.machine.ranked

    @property
    def original(self) -> bool:
        """True if gears are made from the weights."""
        return self.saved is None and self.codes is None

    @property
    def dtype(self) -> str:
        """The floating-point type of most weights, by its name in the headers."""
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
        """Length of the logits, if config.json has it."""
        text = self.config.get("text_config")
        found = self.config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
        return found if isinstance(found, int) else None


def describe(settings: GearedSettings) -> Description:
    """Describe a model and this machine. A Hub repository is downloaded; no weight is read.

    Raises:
        GearbxError: a missing model, damaged or inconsistent files, or code that is not trusted.
    """
    model = settings.model
    directory = find(model.model or DEMO_MODEL)
    check_model(directory, model.trust_remote_code, {})
    files = read_files(directory)
    described = Description(model.model, directory, read_config(directory), files, machine_for(settings))
    return replace(described, precision=precision_of(settings, described))


def machine_for(settings: GearedSettings) -> Machine:
    """Describe this machine. Without --gears, kernels are compiled, because default gears depend on them."""
    on, flag, no_kernels = device(), settings.gears.kernels, ""
    if on == CPU and settings.layout.gears is None:
        show_compiling()
        choice = choose(flag.of_gearbox["kernels"], flag.activations)
        no_kernels = "" if choice.native else choice.reason
    ranked = current() is not None
    return Machine(on, available_memory(), whole_memory(), recommended_memory(), ranked, no_kernels)


def precision_of(settings: GearedSettings, described: Description) -> PrecisionManifest | None:
    """Return the manifest of --manifest, or else a geared checkpoint's if there is a controller.

    Raises:
        GearbxError: a file that cannot be read, or belongs to a different model.
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
