"""What was decided is made: `build` makes the model, its gearbox and the mode, and decides nothing.

A command that has to look at a prompt before gears are made takes two steps: `Loaded.of`, then `in_gears`.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..bit_selection.precision import PrecisionManifest, fitted_to
from ..compat.templates import confine
from ..decoding.caches import check_heads
from ..decoding.governor import Governor, MemoryGuard
from ..decoding.mode import Mode
from ..decoding.modes import PAIR, make_mode
from ..decoding.pair import bytes_read
from ..decoding.sampling import sampler_for
from ..decoding.stream import parameters_of
from ..errors import GearbxError, GearbxWarning, error_context
from ..files.reading import shown
from ..gears.cost import read_files
from ..gears.discovery import is_quantized, vocabulary
from ..gears.gearbox import Gearbox, Observer, in_one_gear
from ..gears.in_place import own_codes
from ..gears.kernel_choices import AS_8_BITS, AS_EXACT, AS_IT_IS, measure_gears, seconds_as_stored
from ..gears.mapped import active_memory
from ..gears.saved import saved_gears
from ..kernels import ACTIVATIONS, MEASURE
from ..kernels.device import recommended_memory
from ..kernels.tuner import FAILED
from ..loading import DEMO_MODEL, find, load, load_small, model_name
from ..machine.sensors import OwnMemory, Scripted, Sensor, Watch, this_machine
from ..ranks.place import current
from ..settings import human_bytes
from .bases import Base, find_base
from .decide import Decision, decide
from .describe import describe
from .flags import CacheSettings, GearedSettings, ModelSettings, SamplingSettings, check_sampling
from .memory import beyond
from .tables import kernels_table
from .terminal import messages, note, show_compiling, show_encoding, show_keeping, spinner

SLOW_MAKING = 5.0  # seconds that gears take to be made, from which on a geared checkpoint is worth its disk


def decided(settings: GearedSettings, several_modes: bool = False) -> Decision:
    """Return how the model that settings name is to run. Raises GearbxError as `describe` and `decide`."""
    return decide(settings, describe(settings), several_modes)


def build(decision: Decision) -> "Geared":
    """Return the model with its gearbox. Raises GearbxError where it cannot be loaded, or gears do not fit it."""
    return Loaded.of(decision).in_gears()


@dataclass(frozen=True)
class Loaded:
    """A model as loaded, before anything takes long, and how it is to run."""

    decision: Decision
    model: nn.Module
    tokenizer: Any
    config: dict

    @classmethod
    def of(cls, decision: Decision, chat_template: str = "") -> "Loaded":
        """Load the model, without gears as yet. Raises GearbxError as `load_model`.

        Args:
            chat_template: replaces the tokenizer's.
        """
        for said in decision.warnings:
            warnings.warn(said, GearbxWarning, stacklevel=2)
        # Codes that are split as they are read take no memory twice.
        lazy = bool(decision.codes) and not decision.observes
        # Originals that no gear keeps are read once, when gears are made.
        passing = not decision.observes and not decision.ladder.top.dense
        how: dict[str, Any] = {"lazy": lazy, "directory": decision.model.directory, "keep_mapped": passing}
        return cls(decision, *load_model(decision.settings.model, chat_template, **how))

    @property
    def name(self) -> str:
        return self.decision.model.title

    def in_gears(self) -> "Geared":
        """Return the model with its gearbox. Raises GearbxError for gears that do not fit the model."""
        decision = self.decision
        settings = decision.settings
        if settings.cache.kv_gears is not None:
            check_heads(self.model, settings.cache.kv_gears)
        for said in decision.notes:
            note(said)
        if decision.exact_for_room:
            note_cost(self.model, ACTIVATIONS[settings.gears.kernels.activations], decision.group_size)
        base = find_base(decision, self.model, self.tokenizer) if decision.takes_base else None
        return Geared(self, make_gearbox(decision, self.model, base))

    def check_gears(self) -> None:
        """Validate that gears can be compared. Raises GearbxError for a quantized model whose codes have one gear."""
        if self.decision.one_gear:
            told = f" ({self.decision.codes})" if self.decision.codes else ""
            raise GearbxError(f"{self.name}: is quantized already and has no gears to compare{told}; give the original")

    def gearbox(self) -> Gearbox:
        """Like `in_gears`. Raises GearbxError for a model that has no gears, too."""
        self.check_gears()
        gearbox = self.in_gears().gearbox
        assert isinstance(gearbox, Gearbox)
        return gearbox


@dataclass(frozen=True)
class Geared:
    """A loaded model with its gearbox, or with an observer where nothing shifts."""

    loaded: Loaded
    gearbox: Gearbox | Observer

    def mode(self, typed: str, mode: Mode | None = None) -> Mode:
        """Return the mode for a prompt, as typed; `mode` replaces that of the flags."""
        return (mode or self.loaded.decision.mode).for_prompt(typed, self.gearbox.ladder)

    def why(self) -> str:
        """Return which gears, format and kernels run, and what decided about them, in one sentence."""
        gearbox, reasons = self.gearbox, "; ".join(self.loaded.decision.reasons)
        if not isinstance(gearbox, Gearbox):
            return f"gears {gearbox.ladder} are only named: no layer changes gear"
        kernels = "native kernels" if gearbox.kernels.native else f"MLX's kernels ({gearbox.kernels.reason})"
        calibrated = "; the lowest gear's codes are calibrated" if gearbox.base else ""
        return f"gears {gearbox.ladder} in format {gearbox.format.name}, {kernels}: {reasons}{calibrated}"

    def of_making(self) -> str:
        """Return what makes later starts faster, where making the gears took long; "" elsewhere."""
        gearbox, decision = self.gearbox, self.loaded.decision
        if not isinstance(gearbox, Gearbox) or decision.saved or decision.codes or gearbox.making_seconds < SLOW_MAKING:
            return ""
        if getattr(gearbox.source, "kept", None) is not None:  # the next start maps them
            return ""
        model = decision.settings.model.model
        flags = f"{f'--model {model} ' if model else ''}--mlx-path DIR --gears {gearbox.ladder}"
        return (
            f"making the gears took {gearbox.making_seconds:.0f} s: gearbx_mlx convert {flags} --format "
            f"{gearbox.format.name} writes them once, and --model DIR starts without that"
        )

    @contextlib.contextmanager
    def governor(self, verbose: bool = True) -> Iterator[Governor | MemoryGuard | None]:
        """Yield what caps the gears while the context lasts, or only holds a limit of memory.

        None where neither is asked for.

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
            raise GearbxError(f"the model changes no gear, so nothing can be capped; leave out {flag}")
        if limit is not None and not decision.caps:
            yield MemoryGuard(self.gearbox, own_memory(limit))
            return
        order: dict[str, Any] = {}  # of the layers to cap
        if decision.precision is not None:
            order = {"sensitivity": decision.precision.sensitivity, "bounds": decision.precision.bounds}
        own = [] if limit is None else [own_memory(limit)]
        with make_watch(own, target is not None, verbose) as watch:
            yield Governor(self.gearbox, target or None, watch=watch, **order)


def note_cost(model: nn.Module, x_bits: int, group_size: int) -> None:
    """Say what products in format exact cost here, and those of one gear of 8 bits, where that can be timed."""
    seconds = seconds_as_stored(model, x_bits, group_size)
    if seconds:
        exact, quantized = (f"{seconds[name] / seconds[AS_IT_IS]:.2f}" for name in (AS_EXACT, AS_8_BITS))
        note(
            f"products in format exact take {exact} times as long as with the weights as they are, and those of one "
            f"gear of 8 bits {quantized} times, for less memory and a small loss: --mode static --gears 8"
        )


def make_gearbox(decision: Decision, model: nn.Module, base: Base | None = None) -> Gearbox | Observer:
    """Return a gearbox with everything that was asked for; an observer for a model without gears.

    Raises:
        GearbxError: gears that do not fit the model.
    """
    settings = decision.settings
    dtype, gears = settings.model.dtype, settings.gears
    kernels, residency = gears.kernels, gears.residency.name
    show_compiling()
    if decision.observes:
        return Observer(model, decision.ladder, dtype=dtype, **kernels.of_gearbox)
    show_encoding()
    show_keeping()
    layers: dict[str, Any] = {"manage": decision.manage, "widths": decision.cap_bits}
    if decision.precision is not None and decision.saved is None:
        layers = layers_of_manifest(decision, decision.precision, model)
    elif decision.precision is not None and gears.manifest is not None:
        layers["tables"] = stored_tables(decision, decision.precision)
    gearbox = Gearbox(
        model,
        decision.ladder,
        format=decision.format,
        group_size=decision.group_size,
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
    """Print, on stderr, which kernels were chosen by what was measured."""
    tuner = gearbox.kernel_choices.tuner
    for product, wrong in tuner.wrong.items():
        for name, difference in wrong.items():
            by = (
                "is not a number"
                if difference == FAILED
                else f"differs by {difference:.2g} times what rounding explains"
            )
            note(f"kernel {name} is not used for {product}: its product {by}")
    if tuner.used:
        messages.print(kernels_table(tuner.used))
        note(f"kernels: measured in {tuner.seconds:.2f} s" if tuner.seconds else "kernels: as measured earlier")
    else:
        note("kernels: nothing to choose, for layers so small, with GEARBX_TUNE=0 or without native kernels")


def layers_of_manifest(decision: Decision, precision: PrecisionManifest, model: nn.Module) -> dict[str, Any]:
    """Return the manifest's part of a gearbox's keywords: manage, tables and widths.

    Raises:
        GearbxError: it belongs to another model, or names a layer that this model does not have.
    """
    file = decision.settings.gears.manifest
    with error_context(file):
        manifest, _, missing = fitted_to(precision, model)
    for path in missing:
        note(f"{file}: has no {path}, which stays at full precision in the tables")
    tables = manifest.tables(decision.ladder)
    uniform = [gear.name for gear in decision.ladder if gear.name not in tables and not gear.dense]
    if uniform:
        note(f"{file}: has no table for {', '.join(uniform)}: all layers alike; gearbx_mlx allocate makes one")
    return {"manage": decision.manage, "tables": tables, "widths": sorted({*manifest.bits, *decision.cap_bits})}


def stored_tables(decision: Decision, precision: PrecisionManifest) -> dict[str, dict[str, int]]:
    """Return the tables of a manifest for a geared checkpoint. Raises GearbxError for bits that it does not store."""
    assert decision.saved is not None
    tables, stored = precision.tables(decision.ladder), decision.saved.gears
    wanted = sorted({bits for table in tables.values() for bits in table.values()} | {*stored})
    missing = [bits for bits in wanted if bits not in stored]
    if missing:
        settings = decision.settings
        raise GearbxError(
            f"{settings.gears.manifest}: its tables have {missing[0]} bits, which {settings.model.model} does not "
            f"store; convert the original with --gears {','.join(map(str, wanted))}"
        )
    return tables


def own_memory(limit: int) -> OwnMemory:
    """Reads this process's memory. Raises GearbxError where the model alone takes more."""
    reader = OwnMemory(limit, active_memory)
    if reader.bytes() > limit:
        size = human_bytes(limit)
        raise GearbxError(
            f"--residency disk:{size}: with the model loaded this process has {human_bytes(reader.bytes())}; "
            "give more, or use fewer --gears"
        )
    return reader


def make_watch(own: Sequence[Sensor], machine: bool, verbose: bool) -> Watch:
    """Reads the machine's state, or one that a file plays; prints which sensors work, and why the others do not.

    Args:
        own: sensors of this process, which are read in any case.
        machine: read this machine too.
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


def load_model(
    settings: ModelSettings,
    chat_template: str = "",
    *,
    lazy: bool = False,
    directory: Path | None = None,
    keep_mapped: bool = False,
) -> tuple[nn.Module, Any, dict]:
    """Load model, tokenizer and configuration.

    Args:
        chat_template: replaces the tokenizer's.
        lazy: weights are not read yet.
        keep_mapped: as of `load`.
        directory: where the model is, if that is known.

    Raises:
        GearbxError: as `load`; an end-of-text token that the vocabulary does not have.
    """
    confine()
    trusted = settings.trust_remote_code
    keywords: dict[str, Any] = {"trust_remote_code": trusted, "adapter_path": settings.adapter_path, "lazy": lazy}
    keywords["keep_mapped"] = keep_mapped
    if chat_template:
        keywords["tokenizer_config"] = {"chat_template": chat_template}
    run = current()
    if run is not None:
        keywords |= {"group": run.group, "pipeline": os.environ.get("GEARBX_PIPELINE") == "1"}
    model, tokenizer, config = load(directory or settings.model, return_config=True, **keywords)
    known = tokenizer.get_vocab() if settings.extra_eos_token else {}
    for token in settings.extra_eos_token:
        if token not in known and token not in map(str, known.values()):  # mlx-lm takes other words, and ends nothing
            raise GearbxError(f"--extra-eos-token {shown(token)}: is not in the vocabulary; give a token or its number")
        tokenizer.add_eos_token(token)
    return model, tokenizer, config


def load_original(settings: ModelSettings) -> tuple[nn.Module, Any, dict]:
    """Like `load_model`. Raises GearbxError for a model that is quantized, or whose checkpoint has gears."""
    model, tokenizer, config = load_model(settings)
    if is_quantized(model) or saved_gears(model) is not None:
        codes = own_codes(model)
        told = "" if codes is None else f" ({codes.summary()})"
        name = model_name(settings.model)
        raise GearbxError(f"{name}: is not an original model{told}; give the one that it was made from")
    return model, tokenizer, config


def generation_keywords(
    sampling: SamplingSettings, cache: CacheSettings, tokenizer: Any, prompt_cache: Any = None
) -> dict[str, Any]:
    """Keywords of mlx-lm's stream_generate.

    Raises:
        GearbxError: numbers beyond the vocabulary, a draft model that cannot be loaded or has another vocabulary.
    """
    check_sampling(sampling, tokenizer.vocab_size)
    chosen = {name: value for name, value in vars(sampling).items() if name != "seed"}
    sampler = sampler_for(tokenizer, **chosen)
    draft_model = load_draft_model(cache.draft_model, tokenizer)
    return vars(cache) | {"sampler": sampler, "prompt_cache": prompt_cache, "draft_model": draft_model}


def load_draft_model(path: str | None, tokenizer: Any) -> Any:
    """Return the draft model on the kernels that are fastest here, or None. Raises GearbxError for another
    vocabulary."""
    if path is None:
        return None
    show_compiling()
    model, own = load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise GearbxError(
            f"--draft-model {path}: its vocabulary is not that of the model; give one with the same tokenizer"
        )
    in_one_gear(model)
    return model


@dataclass(frozen=True)
class LoadedPair:
    """Two loaded models and their figures: (small, large) each."""

    small: nn.Module
    large: nn.Module
    tokenizer: Any
    config: dict

    @property
    def vocab_size(self) -> int:
        return min(vocabulary(self.small), vocabulary(self.large))

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters; quantized ones count as the weights that they stand for."""
        return parameters_of((self.small, self.large))

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes that a token reads, in the type of the checkpoint."""
        return bytes_read(self.small), bytes_read(self.large)

    def mode(self, flags: Mapping[str, Any]) -> Mode:
        """Mode pair, with the flags of modes that were given."""
        return make_mode(PAIR, {**flags, "small_model": self.small})


def warn_of_pair(small: str, large: str | None) -> None:
    """Warn of two models that do not fit into memory together."""
    most = recommended_memory()
    needed = 0 if most is None else sum(read_files(find(name or DEMO_MODEL)).total for name in (small, large))
    if most is not None and needed > most:
        pair = f"the pair of {small} and {model_name(large)}"
        warnings.warn(beyond(pair, needed, most, "give quantized models"), GearbxWarning, stacklevel=3)


def load_pair(settings: ModelSettings, small_model: str, chat_template: str = "") -> LoadedPair:
    """Return both models, in the type that --dtype asks for, on the kernels that are fastest here.

    Raises:
        GearbxError: a model that cannot be loaded, or another tokenizer.
    """
    warn_of_pair(small_model, settings.model)
    large, tokenizer, config = load_model(settings, chat_template)
    small = load_small(small_model, tokenizer, trust_remote_code=settings.trust_remote_code)
    for model in (small, large):
        in_one_gear(model, settings.dtype)
    return LoadedPair(small, large, tokenizer, config)
