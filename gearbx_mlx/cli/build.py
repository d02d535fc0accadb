"""Making a decided model: `Loaded.of` loads it, and `in_gears` adds its gearbox. Nothing is decided here.

Between the two steps a command can look at its prompt, before anything takes long.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..bit_selection.precision import PrecisionManifest, fitted_to
from ..compat.templates import confine
from ..conversion.calibrated_base import CalibratedBase
from ..decoding.caches import check_heads
from ..decoding.governor import Governor, MemoryGuard
from ..decoding.head_files import is_head, read_head
from ..decoding.mode import Mode
from ..decoding.modes import PAIR, make_mode
from ..decoding.sampling import sampler_for
from ..errors import GearbxError, GearbxWarning, error_context
from ..files.reading import shown
from ..gears.cost import read_files
from ..gears.discovery import is_quantized, vocabulary
from ..gears.gearbox import Gearbox, Observer, in_one_gear
from ..gears.in_place import own_codes
from ..gears.kernel_choices import AS_8_BITS, AS_EXACT, AS_IT_IS, measure_gears, seconds_as_stored
from ..gears.ladder import EXACT_FORMAT
from ..gears.mapped import active_memory
from ..gears.saved import saved_gears
from ..kernels import ACTIVATIONS, MEASURE
from ..kernels.device import recommended_memory, wire
from ..kernels.tuner import FAILED
from ..loading import DEMO_MODEL, find, load, load_small, model_name
from ..machine.sensors import OwnMemory, Scripted, Sensor, Watch, this_machine
from ..ranks.place import current
from ..settings import human_bytes
from .bases import find_base
from .decide import Decision, decide
from .describe import describe
from .flags import CacheSettings, GearedSettings, ModelSettings, SamplingSettings, check_sampling
from .memory import memory_problem
from .tables import kernels_table
from .terminal import messages, note, show_compiling, show_encoding, show_keeping, spinner


def decided(settings: GearedSettings, several_modes: bool = False) -> Decision:
    """Return the decision for the model that settings name."""
    return decide(settings, describe(settings), several_modes)


@dataclass(frozen=True)
class Loaded:
    """A loaded model without gears, and the decision on how it runs."""

    decision: Decision
    model: nn.Module
    tokenizer: Any
    config: dict

    @classmethod
    def of(cls, decision: Decision, chat_template: str = "") -> "Loaded":
        """Load the model.

        Args:
            chat_template: replaces the tokenizer's.

        Raises:
            GearbxError: as `load_model`.
        """
        for warning in decision.warnings:
            warnings.warn(warning, GearbxWarning, stacklevel=2)
        keywords: dict[str, Any] = {
            "directory": decision.model.directory,
            # Codes that are split while they are read take no memory twice.
            "lazy": bool(decision.codes) and not decision.observes,
            # Original weights that no gear keeps are read once, when gears are made.
            "keep_mapped": not decision.observes and (bool(decision.format.ladders) or not decision.ladder.top.dense),
        }
        return cls(decision, *load_model(decision.settings.model, chat_template, **keywords))

    @property
    def name(self) -> str:
        return self.decision.model.title

    def in_gears(self) -> "Geared":
        """Return the model with its gearbox.

        Raises:
            GearbxError: gears that do not fit the model.
        """
        decision, settings = self.decision, self.decision.settings
        if settings.cache.kv_gears is not None:
            check_heads(self.model, settings.cache.kv_gears)
        for line in decision.notes:
            note(line)
        if decision.drafts and decision.format.name == EXACT_FORMAT:
            note_cost(self.model, ACTIVATIONS[settings.gears.kernels.activations], decision.stored.group_size)
        base = find_base(decision, self.model, self.tokenizer) if decision.takes_base else None
        geared = Geared(self, make_gearbox(decision, self.model, base))
        wire(decision.stored.needs(decision.model, settings.gears.residency.name == "resident"))
        return geared

    def check_gears(self) -> None:
        """Validate that the model has gears to compare, unlike a quantized one with one gear."""
        if self.decision.one_gear:
            codes = f" ({self.decision.codes})" if self.decision.codes else ""
            raise GearbxError(f"{self.name}: quantized already, without gears to compare{codes}; use the original")

    def gearbox(self) -> Gearbox:
        """Return the gearbox of a model with gears to compare."""
        self.check_gears()
        gearbox = self.in_gears().gearbox
        assert isinstance(gearbox, Gearbox)
        return gearbox


@dataclass(frozen=True)
class Geared:
    """A loaded model with its gearbox, or with an observer if no layer changes gear."""

    loaded: Loaded
    gearbox: Gearbox | Observer

    def mode(self, typed: str, mode: Mode | None = None) -> Mode:
        """Return the mode for a prompt, as typed. mode: replaces the flags' mode."""
        return (mode or self.loaded.decision.mode).for_prompt(typed, self.gearbox.ladder)

    def why(self) -> str:
        """Return gears, format and kernels with their reasons, in one sentence."""
        gearbox, reasons = self.gearbox, "; ".join(self.loaded.decision.reasons)
        if not isinstance(gearbox, Gearbox):
            return f"gears {gearbox.ladder} are only named: no layer changes gear"
        kernels = "native kernels" if gearbox.kernels.native else f"MLX's kernels ({gearbox.kernels.reason})"
        calibrated = "; the lowest gear's codes are calibrated" if gearbox.base else ""
        return f"gears {gearbox.ladder} in format {gearbox.format.name}, {kernels}: {reasons}{calibrated}"

    @contextlib.contextmanager
    def governor(self, verbose: bool = True) -> Iterator[Governor | MemoryGuard | None]:
        """Yield a governor of the gears, or a guard of a memory limit; None if no flag requests one.

        Args:
            verbose: print which sensors of this machine work.

        Raises:
            GearbxError: a model that changes no gear, or whose layers cannot be capped or timed.
        """
        decision, settings = self.loaded.decision, self.loaded.decision.settings
        limit, target = settings.gears.residency.limit, settings.controller.target_tps
        if limit is None and target is None:
            yield None
            return
        if not isinstance(self.gearbox, Gearbox):
            flag = "--residency with a size" if target is None else "--target-tps"
            raise GearbxError(f"{flag}: the model changes no gear, so nothing can be capped; omit it")
        if limit is not None and not decision.caps:
            yield MemoryGuard(self.gearbox, own_memory(limit))
            return
        order: dict[str, Any] = {}  # in which layers are capped
        if decision.precision is not None:
            order = {"sensitivity": decision.precision.sensitivity, "bounds": decision.precision.bounds}
        own = [] if limit is None else [own_memory(limit)]
        with make_watch(own, target is not None, verbose) as watch:
            yield Governor(self.gearbox, target or None, watch=watch, **order)


def note_cost(model: nn.Module, x_bits: int, group_size: int) -> None:
    """Print the cost of matmuls in format exact, and of one 8-bit gear, if they can be timed."""
    seconds = seconds_as_stored(model, x_bits, group_size)
    if seconds:
        exact, quantized = (f"{seconds[name] / seconds[AS_IT_IS]:.2f}" for name in (AS_EXACT, AS_8_BITS))
        note(
            f"matmuls in format exact take {exact}× the time of original weights, and one 8-bit gear {quantized}×; "
            "use --mode static --gears 8 for less memory and a small loss"
        )


def make_gearbox(decision: Decision, model: nn.Module, base: CalibratedBase | None = None) -> Gearbox | Observer:
    """Return the gearbox of a decision, or an observer of a model without gears."""
    settings = decision.settings
    dtype, gears = settings.model.dtype, settings.gears
    kernels, residency, precision = gears.kernels, gears.residency.name, decision.precision
    show_compiling()
    if decision.observes:
        return Observer(model, decision.ladder, dtype=dtype, **kernels.of_gearbox)
    show_encoding()
    show_keeping()
    layers: dict[str, Any] = {"manage": decision.stored.manage, "widths": decision.cap_bits}
    if precision is not None and decision.model.saved is None:
        layers |= layers_of_manifest(decision, precision, model)
    elif precision is not None and gears.manifest is not None:
        layers["tables"] = stored_tables(decision, precision)
    gearbox = Gearbox(
        model,
        decision.ladder,
        format=decision.format,
        group_size=decision.stored.group_size,
        low_model=None if gears.low_model is None else load(gears.low_model)[0],
        residency=residency,
        checkpoint=decision.model.directory if residency == "disk" else None,
        dtype=dtype,
        base=None if base is None else base.layers,
        keep=not gears.no_cache,
        **kernels.of_gearbox,
        **layers,
    )
    if kernels.name == MEASURE:
        with spinner("measuring which kernels are fastest here"):
            measure_gears(gearbox, (1, 2, 4, 8, 16))  # vectors: all up to 16 share their measurements
        show_kernels(gearbox)
    return gearbox


def show_kernels(gearbox: Gearbox) -> None:
    """Print, on stderr, the kernels that measurements chose."""
    tuner = gearbox.kernel_choices.tuner
    for product, wrong in tuner.wrong.items():
        for name, error in wrong.items():
            reason = "is not a number" if error == FAILED else f"differs by {error:.2g}× the rounding bound"
            note(f"kernel {name}: not used for {product}; its result {reason}")
    if tuner.used:
        messages.print(kernels_table(tuner.used))
        note(f"kernels: measured in {tuner.seconds:.2f} s" if tuner.seconds else "kernels: as measured earlier")
    else:
        note("kernels: no choice, because layers are small, GEARBX_TUNE=0 is set or native kernels are missing")


def layers_of_manifest(decision: Decision, precision: PrecisionManifest, model: nn.Module) -> dict[str, Any]:
    """Return the manifest's part of a gearbox's keywords: tables and widths."""
    file = decision.settings.gears.manifest
    with error_context(file):
        manifest, _, missing = fitted_to(precision, model)
    for path in missing:
        note(f"{file}: has no {path}, which stays at full precision in the tables")
    tables = manifest.tables(decision.ladder)
    uniform = [gear.name for gear in decision.ladder if gear.name not in tables and not gear.dense]
    if uniform:
        note(f"{file}: no table for {', '.join(uniform)}, so all layers are alike; use gearbx_mlx allocate for one")
    return {"tables": tables, "widths": sorted({*manifest.bits, *decision.cap_bits})}


def stored_tables(decision: Decision, precision: PrecisionManifest) -> dict[str, dict[str, int]]:
    """Return the tables of a manifest, with bits that the geared checkpoint stores."""
    assert decision.model.saved is not None
    tables, stored = precision.tables(decision.ladder), decision.model.saved.gears
    wanted = sorted({bits for table in tables.values() for bits in table.values()} | {*stored})
    missing = [bits for bits in wanted if bits not in stored]
    if missing:
        settings = decision.settings
        raise GearbxError(
            f"{settings.gears.manifest}: {settings.model.model} does not store the tables' bits, got {missing[0]}; "
            f"use a checkpoint converted with --gears {','.join(map(str, wanted))}"
        )
    return tables


def own_memory(limit: int) -> OwnMemory:
    """Return the sensor of this process's memory. Raises GearbxError if the memory exceeds the limit.

    Args:
        limit: bytes.
    """
    reader = OwnMemory(limit, active_memory)
    if reader.bytes() > limit:
        used = human_bytes(reader.bytes())
        raise GearbxError(
            f"--residency disk:{human_bytes(limit)}: below the process's memory with the model, got {used}; "
            "use a larger size, or fewer --gears"
        )
    return reader


def make_watch(own: Sequence[Sensor], machine: bool, verbose: bool) -> Watch:
    """Return a watch of the machine's state, or of a script in $GEARBX_MACHINE.

    Args:
        own: sensors of this process, always read.
        machine: read this machine's sensors too.
        verbose: print which of them work, and why others do not.
    """
    script = os.environ.get("GEARBX_MACHINE")
    if script:
        return Watch([Scripted.from_file(script), *own])
    if not machine:
        return Watch(own)
    sensors, absent = this_machine()
    reasons: dict[str, list[str]] = {}
    for sensor, reason in absent.items():
        reasons.setdefault(reason, []).append(sensor)
    missing = "".join(f"; no {' and '.join(names)} ({reason})" for reason, names in reasons.items())
    if verbose:
        names = [sensor.name for sensor in sensors] or ["nothing"]
        note(f"watching {' and '.join(names)} of this machine{missing}")
    return Watch([*sensors, *own])


def load_model(settings: ModelSettings, chat_template: str = "", **keywords: Any) -> tuple[nn.Module, Any, dict]:
    """Load model, tokenizer and configuration.

    Args:
        chat_template: replaces the tokenizer's.
        keywords: directory (of the model, if known), and keywords of `load`.

    Raises:
        GearbxError: as `load`; an end-of-text token that the vocabulary lacks.
    """
    confine()
    place = keywords.pop("directory", None) or settings.model
    keywords |= {"trust_remote_code": settings.trust_remote_code, "adapter_path": settings.adapter_path}
    if chat_template:
        keywords["tokenizer_config"] = {"chat_template": chat_template}
    run = current()
    if run is not None:
        keywords |= {"group": run.group, "pipeline": os.environ.get("GEARBX_PIPELINE") == "1"}
    model, tokenizer, config = load(place, return_config=True, **keywords)
    known = tokenizer.get_vocab() if settings.extra_eos_token else {}
    for token in settings.extra_eos_token:
        if token not in known and token not in map(str, known.values()):  # mlx-lm accepts it, and ends nothing
            raise GearbxError(
                f"--extra-eos-token: not in the vocabulary, got {shown(token)}; use a token or its number"
            )
        tokenizer.add_eos_token(token)
    return model, tokenizer, config


def load_original(settings: ModelSettings) -> tuple[nn.Module, Any, dict]:
    """Load model, tokenizer and configuration of a model that is neither quantized nor in gears."""
    model, tokenizer, config = load_model(settings)
    if is_quantized(model) or saved_gears(model) is not None:
        codes = own_codes(model)
        found = "a model in gears" if codes is None else codes.summary()
        raise GearbxError(f"{model_name(settings.model)}: not an original model, got {found}; use its original")
    return model, tokenizer, config


def generation_keywords(
    sampling: SamplingSettings,
    cache: CacheSettings,
    tokenizer: Any,
    prompt_cache: Any = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Return keywords of mlx-lm's stream_generate.

    Args:
        model: that a draft model drafts for.

    Raises:
        GearbxError: numbers beyond the vocabulary, or a draft model that cannot be loaded or does not fit the model.
    """
    check_sampling(sampling, tokenizer.vocab_size)
    sampler = sampler_for(tokenizer, **{name: value for name, value in vars(sampling).items() if name != "seed"})
    draft_model = load_draft_model(cache.draft_model, tokenizer, model)
    return vars(cache) | {"sampler": sampler, "prompt_cache": prompt_cache, "draft_model": draft_model}


def load_draft_model(path: str | None, tokenizer: Any, target: nn.Module | None) -> Any:
    """Return the draft model with the fastest kernels here, or the head of the target; None without a path."""
    if path is None:
        return None
    show_compiling()
    directory = find(path)
    if target is not None and is_head(directory):
        return read_head(directory, target)
    model, own = load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise GearbxError(
            f"--draft-model {path}: the vocabulary differs from the model's; use a model with the same tokenizer"
        )
    in_one_gear(model)
    return model


@dataclass(frozen=True)
class LoadedPair:
    """Two loaded models of mode pair."""

    small: nn.Module
    large: nn.Module
    tokenizer: Any
    config: dict

    @property
    def vocab_size(self) -> int:
        return min(vocabulary(self.small), vocabulary(self.large))

    def mode(self, flags: Mapping[str, Any]) -> Mode:
        """Return mode pair. flags: values of mode flags by name."""
        return make_mode(PAIR, {**flags, "small_model": self.small})


def load_pair(settings: ModelSettings, small_model: str, chat_template: str = "") -> LoadedPair:
    """Return both models, in the type of --dtype, with the fastest kernels here.

    Raises:
        GearbxError: a model that cannot be loaded, or a different tokenizer.
    """
    limit = recommended_memory()
    models = () if limit is None else (small_model, settings.model)
    needed = sum(read_files(find(each or DEMO_MODEL)).total for each in models)
    if limit is not None and needed > limit:
        pair = f"the pair of {small_model} and {model_name(settings.model)}"
        warnings.warn(f"{memory_problem(pair, needed, limit)}; use quantized models", GearbxWarning, stacklevel=2)
    large, tokenizer, config = load_model(settings, chat_template)
    small = load_small(small_model, tokenizer, trust_remote_code=settings.trust_remote_code)
    for model in (small, large):
        in_one_gear(model, settings.dtype)
    return LoadedPair(small, large, tokenizer, config)
