"""The model. Names and defaults of flags are mlx-lm's where it has them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from ..decoding.modes import MODES
from ..decoding.policy import MOST_DRAFTED, FixedPolicy
from ..errors import GearbxError
from ..files.writing import check_writable
from ..gears.ladder import (
    DTYPES,
    WHOLE,
    WHOLE_LADDER,
    Ladder,
    check_kv_gears,
    kv_ladder,
)
from ..kernels import DEVICES, KERNELS
from ..machine.readers import Scripted
from ..routing.gates import DEFAULT_POLICY
from ..routing.pair import (
    BITS,
    DEFAULT_MIN_DURATION,
    DEFAULT_WINDOW,
    check_threshold,
    pair_gate,
    pair_monitor,
    scaled,
)
from .gears import AUTO, FloorSettings, GateSettings, GearFlags, LayoutSettings, RoutingSettings
from .settings import Settings, flag, flag_of, parse_bytes

COLDEST = 0.001  # divided by less, logits of half precision overflow


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
        "Gears of the KV cache, ascending bits of 4, 8 and 16, such as 4,16. Default: none",
        metavar="BITS,BITS",
        rare=True,
        parse=kv_ladder,
    )
    kv_gear: int | None = flag(
        None,
        "The gear of the KV cache that is read. Default: it follows that of the weights",
        choices=(4, 8, 16),
        rare=True,
    )
    draft_model: str | None = flag(None, "A model to be used for speculative decoding.", named=True)
    num_draft_tokens: int = flag(3, "Tokens to draft.", least=1, rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kv_gears(self.kv_gears, self.kv_gear, self.kv_bits, self.draft_model)


def check_sampling(settings: SamplingSettings, vocab_size: int) -> None:
    """Raises GearbxError for numbers that exceed the vocabulary."""
    for name, value, limit in (
        ("--top-k", settings.top_k, vocab_size - 1),
        ("--min-tokens-to-keep", settings.min_tokens_to_keep, vocab_size),
    ):
        if value > limit:
            raise GearbxError(f"{name} is {value}, and the vocabulary {vocab_size}; give fewer")


def str2bool(text: str) -> bool:
    return text.lower() not in ("false", "f")


@dataclass(frozen=True)
class OutputSettings(Settings):
    """What a run writes besides the text."""

    title: ClassVar[str] = "output"

    verbose: bool = flag(True, "False: the text alone, when it is complete. Default: True", type=str2bool)
    trace: str | None = flag(None, "Write one JSON object per token.", metavar="FILE.jsonl", named=True)
    summary: str | None = flag(None, "Write the summary as JSON.", metavar="FILE.json", named=True)
    describe: bool = flag(
        False,
        "Before the text, each layer's bits and kernels, and why; after it, which kernels were fastest; on stderr.",
        rare=True,
    )
    color: str = flag("auto", "Tint tokens by gear.", choices=("auto", "always", "never"), rare=True)

    def paths(self) -> tuple[Path | None, Path | None]:
        """Where trace and summary go. Raises GearbxError for places that cannot be written to."""
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


def batch_policy_flag() -> Any:
    """--batch-policy, the same wherever texts share passes."""
    return flag(
        DEFAULT_POLICY,
        "The gear of a step in which several texts share the weights, by the gears that they want: highest, most (the "
        "most wanted), or quantile:Q (the lowest that is enough for a share Q of them).",
        named=True,
        rare=True,
    )


NESTED = "planes"  # the format in which further bits take hardly more memory
CAP_BITS = (4, 5, 6, 8)
SLOWEST = 0.001  # tokens per second


@dataclass(frozen=True)
class ControllerSettings(Settings):
    """What the controller aims at and watches; it runs if any of them is set."""

    title: ClassVar[str] = "controller"

    target_tps: float | None = flag(
        None,
        "Hold N tokens per second: a controller caps the bits of layers, the least sensitive first. It looks at this "
        "machine's heat, battery and memory too.",
        metavar="N",
    )
    watch_machine: str | None = flag(
        None,
        "Cap by heat, battery and memory, at any speed; with FILE by a state that the file plays (docs/machine.md).",
        metavar="FILE",
        nargs="?",
        const="",
        rare=True,
    )
    max_memory: str | None = flag(
        None,
        "Keep this process below so much memory, such as 3GB: layers are capped when it is near, the least sensitive "
        "first, which frees memory with --residency disk.",
        metavar="SIZE",
        rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.limit  # raises now what is wrong with it
        if self.target_tps is not None and not SLOWEST <= self.target_tps < math.inf:
            raise GearbxError(f"--target-tps is {self.target_tps}; give tokens per second, {SLOWEST} or more")
        if self.machine is not None:
            Scripted.from_file(self.machine)

    @property
    def wanted(self) -> bool:
        return any(value is not None for value in (self.target_tps, self.watch_machine, self.max_memory))

    @property
    def machine(self) -> str | None:
        """The file that plays the machine's state; None: this machine, if it is watched."""
        return self.watch_machine or None

    @cached_property
    def limit(self) -> int | None:
        """--max-memory in bytes, read once. Raises GearbxError for what is not a size."""
        return None if self.max_memory is None else parse_bytes(self.max_memory, "--max-memory")

    def widths(self, ladder: Ladder, format: str, stored: Sequence[int] | None) -> tuple[int, ...]:
        """Further bits to which layers can be capped: they are stored at them, or already are in a geared checkpoint.

        Args:
            stored: bits of the gears that the checkpoint holds, to which nothing can be added; None: no gears.
        """
        if not self.wanted or format == WHOLE:  # whose layers have the widths of its ladder alone
            return ()
        if stored is not None:
            return tuple(bits for bits in stored if bits < ladder.top.bits)
        if format != NESTED:
            return ()
        return tuple(bits for bits in CAP_BITS if bits < ladder.top.bits)


def device_flag() -> Any:
    """The flag --device as a field of settings."""
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


SMALL_MODEL = (
    "Local directory or Hub repository of a smaller model with the tokenizer of --model (EAD). For it --thresholds is "
    f"bits, 0 (large alone) to inf (small alone; default: {BITS:g}, scaled to the vocabulary), --window "
    f"{DEFAULT_WINDOW} and --min-gear-duration {DEFAULT_MIN_DURATION} unless given."
)


@dataclass(frozen=True)
class Turns:
    """Settings of the gate between two models; no thresholds: the paper's."""

    thresholds: tuple[float, ...]
    window: int
    min_duration: int

    def threshold(self, vocab_size: int) -> float:
        """The one threshold of a generation, in bits."""
        return self.thresholds[0] if self.thresholds else scaled(BITS, vocab_size)


def turns_of(thresholds: str | None, gate: GateSettings) -> Turns:
    """The settings of the gate between two models.

    Args:
        thresholds: as given: bits, with commas between.

    Raises:
        GearbxError: settings that no pair can have.
    """
    if gate.hysteresis:
        raise GearbxError("--hysteresis: the gate between two models has none; leave it out")
    bits: tuple[float, ...] = ()
    if thresholds is not None:
        try:
            bits = tuple(float(part) for part in thresholds.split(","))
        except ValueError as error:
            raise GearbxError(f"--thresholds {thresholds}: with --small-model give bits, such as {BITS:g}") from error
        if len(bits) > 1:
            raise GearbxError(f"--thresholds {thresholds}: two models have one threshold between them")
        for value in bits:
            check_threshold(value)
    window = DEFAULT_WINDOW if gate.window is None else gate.window
    duration = DEFAULT_MIN_DURATION if gate.min_gear_duration is None else gate.min_gear_duration
    pair_monitor(2, window)
    pair_gate(BITS, duration)
    return Turns(bits, window, duration)


TELEMETRY_ONLY, PAIR = "telemetry-only", "pair"


@dataclass(frozen=True)
class ModeSettings(RoutingSettings):
    """The mode as given (None: as files, model and small model say), and the settings of all modes."""

    title: ClassVar[str] = "mode"

    mode: str | None = flag(
        None,
        "lossless: the low gear drafts, the top gear verifies; token for token the text of --mode static, with the "
        "same --gears, --kernels and --dtype; by default, bfloat16 weights are stored once, in format "
        f"{WHOLE} with gears {WHOLE_LADDER}. route: the entropy of past tokens shifts. kickdown: a token in doubt is "
        "computed again in a higher gear. static: one gear throughout. pair: --model and --small-model take turns. "
        "telemetry-only: nothing shifts, and a record names the gear that route would use. "
        "Default: the mode that the other flags belong to (--thresholds: route, --gear: static, --small-model: pair), "
        "else lossless",
        choices=tuple(MODES),
    )
    gear: str | None = flag(
        None, "The gear of --mode static, which it implies: name or bits. Default: the top gear", named=True
    )
    draft_length: int | None = flag(
        None, f"For --mode lossless: always draft N tokens, 1 to {MOST_DRAFTED}.", metavar="N", rare=True
    )
    lookup_tokens: int | None = flag(
        None,
        "For --mode lossless: where the last tokens of the text occurred before, up to N tokens that followed there "
        f"are proposed at no cost (prompt lookup); 0 turns that off. Default: {MOST_DRAFTED}; 0 with --draft-length",
        least=0,
        most=MOST_DRAFTED,
        metavar="N",
        rare=True,
    )
    prompt_gear: str | None = flag(
        None,
        "The gear that reads the prompt, for --mode route, kickdown and static: name, bits, or same (the one that "
        "begins the text). Default: the top gear, on a CPU 8 bits where the ladder has them",
        named=True,
        rare=True,
    )
    small_model: str | None = flag(None, SMALL_MODEL, named=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_length is not None:
            FixedPolicy(self.draft_length)
        if self.small_model is not None and self.mode not in (None, PAIR):
            raise GearbxError(f"--mode {self.mode} has one model; leave --small-model out, or give --mode pair")
        if self.small_model is None and self.mode == PAIR:
            raise GearbxError("--mode pair needs --small-model, a smaller model with the tokenizer of --model")

    @property
    def observes(self) -> bool:
        """Whether no layer may change gear."""
        return self.mode == TELEMETRY_ONLY


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Which model to load (None: the one that ships), and the type and the device to compute in."""

    title: ClassVar[str] = "model"

    model: str | None = flag(
        None, "Local directory or Hub repository. Default: the model that ships with gearbx-mlx.", named=True
    )
    trust_remote_code: bool = flag(False, "Enable trusting remote code for tokenizer", rare=True)
    adapter_path: str | None = flag(None, "Optional path for the trained adapter weights and config.", named=True)
    extra_eos_token: Sequence[str] = flag(
        (), "Add tokens to the list of eos tokens. Default: none", nargs="+", rare=True
    )
    dtype: str = flag(
        "auto",
        "Type to compute in. auto: the checkpoint's, but float32 where a CPU runs quantized gears.",
        choices=("auto", *DTYPES),
        rare=True,
    )
    pipeline: bool = flag(False, "On several ranks: each has some of the layers, not a part of every layer.", rare=True)
    device: str | None = device_flag()


class GearedSettings(Protocol):
    """The groups of settings that open a model in gears."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def cache(self) -> CacheSettings: ...
    @property
    def layout(self) -> LayoutSettings: ...
    @property
    def gears(self) -> GearFlags: ...
    @property
    def floors(self) -> FloorSettings: ...
    @property
    def mode(self) -> ModeSettings: ...
    @property
    def controller(self) -> ControllerSettings: ...


def check_pair(settings: GearedSettings, further: Mapping[str, object] = MappingProxyType({})) -> None:
    """Check the flags of a pair, where there is a small model.

    Args:
        further: field to value, of flags that only the command has and a pair does not take.

    Raises:
        GearbxError: flags of a single model.
    """
    if settings.mode.small_model is None:
        return
    routed = {*RoutingSettings.__match_args__, "mode", "small_model"}  # which a pair has too
    of_mode = {
        item.name: getattr(settings.mode, item.name) for item in fields(settings.mode) if item.name not in routed
    }
    single = {
        "draft_model": settings.cache.draft_model,
        "kv_gears": settings.cache.kv_gears,
        **vars(settings.controller),
        **further,
        "gears": settings.layout.gears,
        **of_mode,
    }
    for setting, value in single.items():
        if value is not None and value is not False:
            raise GearbxError(f"{flag_of(setting)} is for one model; leave it out with --small-model")
    if settings.mode.initial_gear not in (AUTO, "small", "large"):
        raise GearbxError(f"--initial-gear {settings.mode.initial_gear}: a pair has {AUTO}, small, large")
