"""A model loaded and put into gears as `Resolved` says, with what every command needs of it then."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from ..bit_selection.defaults import Floors
from ..bit_selection.precision import PrecisionManifest, fit
from ..compat.templates import confine
from ..decoding.caches import KeptCache, check_heads, check_prompt_cache, plain_cache
from ..decoding.governor import Governor
from ..decoding.mode import Mode
from ..decoding.modes import mode_class
from ..decoding.pair import Pair, bytes_read
from ..decoding.sampling import sampler_for
from ..decoding.stream import parameters_of
from ..errors import GearbxError, GearbxWarning, about, one_line
from ..files.reading import parse_json, shown, typed
from ..files.writing import replacing_arrays
from ..formats import DEFAULT_FORMAT
from ..gears.activations import compute_in, stored_dtype
from ..gears.cost import ModelFiles, needed_memory, read_files
from ..gears.discovery import Predicate, is_quantized, vocabulary
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..gears.in_place import OwnCodes, own_codes, without_gears
from ..gears.kernel_choices import AS_IT_IS, EXACT, QUANTIZED, choose_kernels, measure_gears, seconds_as_stored
from ..gears.ladder import DENSE, Ladder
from ..gears.saved import saved_gears
from ..kernels import ACTIVATIONS, MEASURE
from ..kernels.device import available_memory, recommended_memory
from ..kernels.dispatch import CPU, METAL, device
from ..kernels.tuner import FAILED, Times
from ..loading import DEMO_MODEL, find, is_packed, load, load_small, model_name
from ..machine.readers import OwnMemory, Reader, Scripted, Watch, this_machine
from ..ranks.place import current
from .bases import Base, find_base
from .flags import (
    TELEMETRY_ONLY,
    CacheSettings,
    ControllerSettings,
    ModelSettings,
    SamplingSettings,
    Turns,
    check_sampling,
)
from .gears import DEQUANT_CACHE, LayoutSettings, initial_gear, route_fields, routing_for
from .resolved import ROUTE, ModeChoice, Resolved, settings_of_mode
from .settings import human_bytes
from .tables import kernels_table
from .terminal import messages, note, progress_bar, show_compiling, show_encoding, spinner

ROOM = 4  # times what a draft takes should be free: the texts of a run need some too
VECTORS = (1, 2, 4, 8, 16)  # in one product: those that share a measurement with all up to 16


@dataclass(frozen=True)
class Loaded:
    """A model as loaded, before anything takes long. codes: what can be done with those of a quantized one."""

    resolved: Resolved
    model: nn.Module
    tokenizer: Any
    config: dict
    codes: str = ""

    @classmethod
    def of(cls, resolved: Resolved, chat_template: str = "") -> "Loaded":
        """The model without gears as yet. Raises GearbxError as `load_model`.

        Args:
            chat_template: replaces the tokenizer's.
        """
        if not resolved.observes:
            warn_of_memory(resolved)
        # Codes that are split as they are read take no memory twice.
        lazy = not resolved.observes and current() is None and is_packed(resolved.model.model)
        model, tokenizer, config = load_model(resolved.model, chat_template, lazy)
        codes = own_codes(model)
        if codes is None:
            if lazy and saved_gears(model) is None:
                mx.eval(model.parameters())
            return cls(resolved, model, tokenizer, config)
        resolved = in_own_codes(resolved, codes)
        return cls(resolved, model, tokenizer, config, codes.told(None if resolved.observes else resolved.ladder))

    @property
    def name(self) -> str:
        return model_name(self.resolved.model.model)

    def in_gears(self) -> "Geared":
        """The model with its gearbox. Raises GearbxError for gears that do not fit the model."""
        resolved = self.resolved
        if resolved.kv_gears is not None:
            check_heads(self.model, resolved.kv_gears)
        if resolved.drafts_best and takes_whole(resolved, self.model):
            resolved = layout_of_drafts(resolved, self.model)
        found = find_base(resolved, self.model, self.tokenizer)
        if found is not None:
            resolved = replace(resolved, why=f"{resolved.why}; the lowest gear's codes are calibrated")
        gearbox = make_gearbox(resolved, self.model, None if found is None else found[1])
        if isinstance(gearbox, Observer) and not resolved.observes:
            note(
                f"{self.name} is quantized and divided between ranks: telemetry only, no layer changes gear; "
                "of what gearbx_mlx convert makes of it, ranks can divide the gears"
            )
        elif self.codes and resolved.observes:
            note(f"{self.name} changes no gear in mode {TELEMETRY_ONLY}; other modes use its {self.codes}")
        elif self.codes:
            note(f"{self.name} is quantized to {self.codes}")
        return Geared(replace(self, resolved=resolved), gearbox)

    def check_gears(self) -> None:
        """Raises GearbxError for a quantized model whose codes have one gear."""
        if without_gears(self.model) or (self.codes and len(self.resolved.ladder) == 1):
            told = f" ({self.codes})" if self.codes else ""
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

    def mode(self, prompt: str, choice: ModeChoice | None = None) -> Mode:
        """The mode for a prompt, as typed; `choice` replaces that of the flags. Raises GearbxError as make_mode."""
        return make_mode(choice or self.loaded.resolved.mode, self.gearbox, prompt)

    def why(self) -> str:
        """Return which gears, format and kernels run, and what decided about them, in one sentence."""
        resolved, gearbox = self.loaded.resolved, self.gearbox
        if not isinstance(gearbox, Gearbox):
            return f"gears {gearbox.ladder} are only named: no layer changes gear"
        kernels = "native kernels" if gearbox.kernels.native else f"MLX's kernels ({gearbox.kernels.reason})"
        return f"gears {gearbox.ladder} in format {gearbox.format.name}, {kernels}: {resolved.why}"

    @contextlib.contextmanager
    def governor(self, verbose: bool = True) -> Iterator[Governor | None]:
        """What caps the gears while the context lasts; None where nothing is to be capped.

        Args:
            verbose: print which readers of this machine work.

        Raises:
            GearbxError: a model that changes no gear, or whose layers cannot be capped or timed.
        """
        settings, precision = self.loaded.resolved.controller, self.loaded.resolved.precision
        if not settings.wanted:
            yield None
            return
        if not isinstance(self.gearbox, Gearbox):
            raise GearbxError(
                "the model changes no gear, so nothing can be capped; leave out --target-tps and --watch-machine"
            )
        order: dict[str, Any] = {}  # of the layers to cap
        if precision is not None:
            order = {"sensitivity": precision.sensitivity, "bounds": precision.bounds}
        own = [] if settings.limit is None else [own_memory(settings.limit)]
        with make_watch(settings, own, verbose) as watch:
            yield Governor(self.gearbox, settings.target_tps, watch=watch, **order)


def in_own_codes(resolved: Resolved, codes: OwnCodes) -> Resolved:
    """The same with the gears that a quantized model's own codes have.

    Raises:
        GearbxError: a ladder that the codes do not have, a mode that needs another one, or a flag for what is made of
            original weights.
    """
    if resolved.observes:
        found = replace(resolved, ladder=resolved.asked.gears or codes.watched(resolved.ladder))
        found.check_mode()
        return found
    given = {
        "--manifest": resolved.manifest,
        "the floors": resolved.floors,
        f"--kernels {DEQUANT_CACHE}": resolved.kernels == DEQUANT_CACHE,
        "--low-model": resolved.low_model,
        f"--residency {resolved.residency}": resolved.residency != "resident",
    }
    with about(model_name(resolved.model.model)):
        ladder = ladder_of_codes(codes, resolved.asked, given)
        drafts_best = resolved.drafts_best and resolved.mode.own.draft_length is None and not resolved.mode.changes
        found = replace(resolved, ladder=codes.drafting() if drafts_best else ladder, why="the checkpoint's own codes")
        found.check_mode()
    return found


def ladder_of_codes(codes: OwnCodes, asked: LayoutSettings, given: Mapping[str, Any]) -> Ladder:
    """The gears of a quantized model that are asked for.

    Args:
        given: flags for what is made of original weights, with their values.

    Raises:
        GearbxError: one of them, another format or group size, or gears that the codes do not have.
    """
    refused = {
        "--format": asked.format not in (None, DEFAULT_FORMAT),
        "--q-group-size": asked.q_group_size not in (None, codes.group_size),
        **given,
    }
    for flag in (flag for flag, value in refused.items() if value):
        raise GearbxError(
            f"is quantized already, and its gears are the first bits of its codes; leave out {flag}, or give "
            "the original"
        )
    return codes.chosen(asked.gears)


def takes_whole(resolved: Resolved, model: nn.Module) -> bool:
    """Whether a model can have format exact, and be fast: MLX's kernels on a CPU decode such weights slowly."""
    if is_quantized(model) or stored_dtype(model) != mx.bfloat16:
        return False
    show_compiling()
    return choose_kernels(resolved.kernels, True, resolved.activations, ours_alone=True).native


def layout_of_drafts(resolved: Resolved, model: nn.Module) -> Resolved:
    """How a model of bfloat16 is stored that drafts for itself: what is faster, as far as memory has room for it.

    Apple's GPUs wait for memory, and format exact has fewer bytes. A CPU computes while it decodes them, and other GPUs
    have no kernel for that: there the weights as they are, with a draft beside them, are faster.
    """
    whole, weights = resolved.in_whole_weights(), sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    beside = weights * whole.ladder[0].bits // DENSE
    sizes = f"{human_bytes(beside)} beside the {human_bytes(weights)} of the checkpoint"
    short = device() == CPU and ROOM * beside > available_memory()
    if short:
        seconds = seconds_as_stored(model, ACTIVATIONS[resolved.activations], resolved.group_size)
        note(f"memory is short for drafts of {sizes}: format exact stores both once{cost_of_whole(seconds)}")
    if device() == METAL or short:
        reason = "memory is short" if short else "this GPU waits for memory"
        return replace(whole, why=f"one exact copy of the weights with its draft inside, since {reason}")
    if resolved.model.model is not None:  # else next to nothing
        note(f"drafts take about {sizes}; --format exact takes less memory than the checkpoint, and is slower here")
    return replace(resolved, ladder=whole.ladder, why="a draft beside the weights as they are, which is fastest here")


def cost_of_whole(seconds: Times) -> str:
    """Say what products in format exact cost here, and those of the gear that takes less memory still.

    Args:
        seconds: of `seconds_as_stored`; "" where there are none.
    """
    if not seconds:
        return ""
    exact, quantized = (f"{seconds[name] / seconds[AS_IT_IS]:.2f}" for name in (EXACT, QUANTIZED))
    return (
        f". Its products take {exact} times as long as with the weights as they are, and those of one gear of 8 bits "
        f"{quantized} times, for less memory and a small loss: --mode static --gears 8"
    )


def make_gearbox(resolved: Resolved, model: nn.Module, base: Base | None = None) -> Gearbox | Observer:
    """A gearbox with everything that was asked for; an observer for a model without gears.

    Raises:
        GearbxError: gears that do not fit the model.
    """
    dtype = resolved.model.dtype
    if resolved.observes or without_gears(model):
        if resolved.kernels == MEASURE:
            note("kernels: nothing is measured without gears")
        return Observer(model, resolved.ladder, dtype=dtype)
    show_compiling()
    show_encoding()
    low_model = None if resolved.low_model is None else load(resolved.low_model)[0]
    layers: dict[str, Any] = {"manage": resolved.manage, "widths": resolved.cap_bits}
    if resolved.precision is not None and resolved.saved is None:
        layers = layers_of_manifest(resolved, resolved.precision, model)
    elif resolved.precision is not None and resolved.manifest is not None:
        layers["tables"] = stored_tables(resolved, resolved.precision)
    elif resolved.floors is not None:
        layers["manage"] = predicate_of_floors(model, resolved, resolved.floors)
    gearbox = Gearbox(
        model,
        resolved.ladder,
        format=resolved.format,
        group_size=resolved.group_size,
        low_model=low_model,
        residency=resolved.residency,
        checkpoint=find(resolved.model.model or DEMO_MODEL) if resolved.residency == "disk" else None,
        dtype=dtype,
        kernels="mlx" if resolved.kernels == DEQUANT_CACHE else resolved.kernels,
        activations=resolved.activations,
        base=None if base is None else base.layers,
        **layers,
    )
    if resolved.kernels == MEASURE:
        with spinner("measuring which kernels are fastest here"):
            measure_gears(gearbox, VECTORS)
        show_kernels(gearbox)
    return gearbox


def show_kernels(gearbox: Gearbox) -> None:
    """Print, on stderr, which kernels were chosen by what was measured."""
    tuner = gearbox.kernel_choices.tuner
    for product, wrong in tuner.wrong.items():
        for name, difference in wrong.items():
            by = "is not a number" if difference == FAILED else f"differs from MLX's by {difference:.2g} times its size"
            note(f"kernel {name} is not used for {product}: its product {by}")
    if tuner.used:
        messages.print(kernels_table(tuner.used))
        note(f"kernels: measured in {tuner.seconds:.2f} s" if tuner.seconds else "kernels: as measured earlier")
    else:
        note("kernels: nothing to choose, for layers so small, with GEARBX_TUNE=0 or without native kernels")


def predicate_of_floors(model: nn.Module, resolved: Resolved, floors: Floors) -> Predicate:
    """Which layers change gear, each with the fewest bits that reach its floor; prints what was chosen."""
    from ..bit_selection.codebook_selection import select_bits, selection_lines  # codebooks: few runs need them

    with progress_bar() as progress:
        selection = select_bits(model, resolved.format.name, resolved.manage, floors, progress)
    for line in selection_lines(selection):
        note(line)
    return selection.predicate


def layers_of_manifest(resolved: Resolved, precision: PrecisionManifest, model: nn.Module) -> dict[str, Any]:
    """The manifest's part of a gearbox's keywords: manage, tables and widths.

    Raises:
        GearbxError: it belongs to another model, or names a layer that this model does not have.
    """
    with about(resolved.manifest):
        manifest, _, missing = fit(precision, model)
    for path in missing:
        note(f"{resolved.manifest}: has no {path}, which stays at full precision in the tables")
    tables = manifest.tables(resolved.ladder)
    uniform = [gear.name for gear in resolved.ladder if gear.name not in tables and not gear.dense]
    if uniform:
        note(
            f"{resolved.manifest}: has no table for {', '.join(uniform)}: all layers alike; "
            "gearbx_mlx.allocate makes one"
        )
    return {"manage": resolved.manage, "tables": tables, "widths": sorted({*manifest.bits, *resolved.cap_bits})}


def stored_tables(resolved: Resolved, precision: PrecisionManifest) -> dict[str, dict[str, int]]:
    """The tables of a manifest for a geared checkpoint. Raises GearbxError for bits that it does not store."""
    assert resolved.saved is not None
    tables, stored = precision.tables(resolved.ladder), resolved.saved.gears
    wanted = sorted({bits for table in tables.values() for bits in table.values()} | {*stored})
    missing = [bits for bits in wanted if bits not in stored]
    if missing:
        raise GearbxError(
            f"{resolved.manifest}: its tables have {missing[0]} bits, which {resolved.model.model} does not store; "
            f"convert the original with --gears {','.join(map(str, wanted))}"
        )
    return tables


def make_mode(choice: ModeChoice, gearbox: Gearbox | Observer, prompt: str) -> Mode:
    """The mode with its settings.

    Args:
        prompt: as typed, which chooses the first gear of mode route.

    Raises:
        GearbxError: thresholds that do not fit the ladder or the model.
    """
    kind = mode_class(choice.of(isinstance(gearbox, Observer)).mode)
    has, ladder = settings_of_mode(kind.name), gearbox.ladder
    own = choice.own
    values: dict[str, Any] = {name: value for name, value in vars(own).items() if value is not None}
    values["window"] = own.filled().window
    if "thresholds" in has:
        model = gearbox.model
        settings = own, ladder, vocabulary(model), partial(model_fingerprint, model)
        routed = kind.name in (ROUTE, TELEMETRY_ONLY)
        values |= route_fields(*settings) if routed else vars(routing_for(*settings))
        values |= {"initial_gear": initial_gear(own, ladder, prompt)}
    return kind(**{field: value for field, value in values.items() if field in has})


def own_memory(limit: int) -> OwnMemory:
    """Reads this process's memory. Raises GearbxError where the model alone takes more."""
    reader = OwnMemory(limit, mx.get_active_memory)
    if reader.bytes() > limit:
        raise GearbxError(
            f"--max-memory {human_bytes(limit)}: with the model loaded this process has {human_bytes(reader.bytes())}; "
            "give more, or use fewer --gears, --format exact or --residency disk"
        )
    return reader


def make_watch(settings: ControllerSettings, own: Sequence[Reader], verbose: bool) -> Watch:
    """Reads a script, or this machine; prints which readers of this machine work, and why the others do not.

    Args:
        own: readers of this process, which are read in any case.
    """
    if settings.machine is not None:
        return Watch([Scripted.from_file(settings.machine), *own])
    if own and settings.watch_machine is None and settings.target_tps is None:
        return Watch(own)
    readers, absent = this_machine()
    reasons: dict[str, list[str]] = {}
    for reader, reason in absent.items():
        reasons.setdefault(reason, []).append(reader)
    missing = "".join(f"; no {' and '.join(names)} ({reason})" for reason, names in reasons.items())
    if verbose:
        names = [reader.name for reader in readers] or ["nothing"]
        note(f"watching {' and '.join(names)} of this machine{missing}")
    return Watch([*readers, *own])


def warn_of_memory(resolved: Resolved) -> None:
    """Warn of a model that needs more memory than macOS recommends for the GPU, and name gears that would fit."""
    most = recommended_memory()
    if most is None or resolved.residency == "stream":
        return
    files = files_of(resolved.model.model)
    if files is None:
        return
    if resolved.drafts_best and all(entry.dtype == "BF16" for entry in files.matrices.values()):
        resolved = resolved.in_whole_weights()
    needed = memory_with(files, resolved)
    if needed > most:
        remedies = [] if files.is_quantized else fitting(files, resolved, most)
        advice = f"{' or '.join(remedies)} would fit" if remedies else "expect it to be slow"
        warn(model_name(resolved.model.model), needed, most, advice)


def warn_of_pair(small: str, large: str | None) -> None:
    """Like `warn_of_memory`, of two models that are in memory together."""
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


def memory_with(files: ModelFiles, resolved: Resolved) -> int:
    """Bytes that a model in these gears needs."""
    bits = [gear.bits for gear in resolved.ladder]
    return needed_memory(files, bits, resolved.format, resolved.group_size, resolved.residency == "resident")


def fitting(files: ModelFiles, resolved: Resolved, most: int) -> list[str]:
    """Changes that make it fit: the most gears from the lowest on, and the residency that has one gear in memory."""
    found = []
    bits = [gear.bits for gear in resolved.ladder]
    can_drop = not resolved.format.ladders or files.manifest is not None
    for count in range(len(bits) - 1, 0, -1) if can_drop else ():
        fewer = replace(resolved, ladder=Ladder(bits[:count]))
        needed = memory_with(files, fewer)
        if needed <= most:
            found.append(f"--gears {fewer.ladder} ({human_bytes(needed)})")
            break
    one = replace(resolved, residency="disk")
    if resolved.residency == "resident" and can_drop and memory_with(files, one) <= most:
        found.append("--residency disk")
    return found


def load_model(settings: ModelSettings, chat_template: str = "", lazy: bool = False) -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration. A `chat_template` replaces the tokenizer's. lazy: weights are not read yet.

    Raises:
        GearbxError: as `load`; a pipeline of one process; an end-of-text token that the vocabulary does not have.
    """
    confine()
    trusted = settings.trust_remote_code
    keywords: dict[str, Any] = {"trust_remote_code": trusted, "adapter_path": settings.adapter_path, "lazy": lazy}
    if chat_template:
        keywords["tokenizer_config"] = {"chat_template": chat_template}
    run = current()
    if run is None and settings.pipeline:
        raise GearbxError("--pipeline is for several ranks, and this process runs alone; start them with mlx.launch")
    if run is not None:
        keywords |= {"group": run.group, "pipeline": settings.pipeline}
    model, tokenizer, config = load(settings.model, return_config=True, **keywords)
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
        told = "" if codes is None else f" ({codes.told()})"
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
    """mlx-lm's draft model, or None. Raises GearbxError for another vocabulary."""
    if path is None:
        return None
    model, own = load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise GearbxError(f"--draft-model {path}: its vocabulary is not that of the model")
    compute_in(model, "auto", is_quantized(model))
    return model


CONVERSATION, FINGERPRINT = "conversation", "fingerprint"  # where they are in the metadata


@dataclass(frozen=True)
class BegunConversation:
    """A conversation that goes on.

    before: its text up to where the next message begins. templated: a chat template made it.
    tokens: those in the cache. bits: of the lowest gear that computed any of them; 0: not known.
    """

    before: str
    templated: bool
    tokens: list[int]
    bits: int = 0


@dataclass(frozen=True)
class PromptCache:
    """The caches of a model's layers, as a file has them.

    fingerprint: of the model that read the text, with its adapters; "" and `begun` None where no chat saved the file.
    """

    file: str
    model: str
    entries: list[Any]
    begun: BegunConversation | None
    fingerprint: str

    def before(self, templated: bool) -> str:
        """What stands before the message in the template's place; "" where the cache is all that is known of it."""
        return self.begun.before if self.begun is not None and self.begun.templated == templated else ""

    def check_weights(self, model: nn.Module) -> None:
        """Raises GearbxError where other weights or adapters read the text than the model has, whatever its name."""
        found = model_fingerprint(model)
        if self.fingerprint not in ("", found):
            raise GearbxError(
                f"{self.file}: made with the weights and adapters {self.fingerprint[:8]}, and {self.model} has "
                f"{found[:8]} now; give the prompt again, or those weights"
            )

    def check_gear(self, mode: Mode, gearbox: Gearbox | Observer) -> None:
        """Warn where another gear computed the entries than reads prompts now: they are used as they are."""
        made = 0 if self.begun is None else self.begun.bits
        if made and isinstance(gearbox, Gearbox):
            bits = mode.gears_of_text(gearbox)[0].bits
            if bits != made:
                said = f"{self.file}: was read in {made} bits, and prompts are read in {bits} here; it is used as it is"
                warnings.warn(said, GearbxWarning, stacklevel=2)

    def unread(
        self, model: nn.Module, tokens: list[int], max_kv_size: int | None, before: str
    ) -> tuple[list[int], list[Any]]:
        """The tokens that the cache does not have, and the caches that go on with them.

        Args:
            max_kv_size: of caches that are made again, as where states cannot be cut to what the tokens begin with.
            before: what the tokens begin with; "": they follow the cache.

        Raises:
            GearbxError: the cache does not suit the model.
        """
        with about(self.file):
            check_prompt_cache(self.entries, model)
        if not before or self.begun is None:
            return tokens, self.entries
        kept = KeptCache(lambda: make_prompt_cache(model, max_kv_size))
        kept.entries, kept.tokens = self.entries, self.begun.tokens
        kept.bits = [self.begun.bits] * len(kept.tokens)
        return kept.unread(tokens), kept.entries


def save_cache(path: Path, entries: list[Any], name: str, model: nn.Module, begun: BegunConversation) -> None:
    """Write the cache of a chat with the model of this name. Raises GearbxError where it cannot be written."""
    metadata = {"model": name, "tokenizer_config": "{}", FINGERPRINT: model_fingerprint(model)}
    metadata[CONVERSATION] = msgspec.json.encode(asdict(begun)).decode()
    with replacing_arrays(path) as place:
        save_prompt_cache(place, plain_cache(entries), metadata)


def load_cache(file: str | None, model: str | None) -> PromptCache | None:
    """A prompt cache; None without a file.

    Raises:
        GearbxError: not a prompt cache, or one of another model than the one that is named.
    """
    if file is None:
        return None
    try:
        entries, metadata = load_prompt_cache(file, return_metadata=True)
        mx.eval([part.state for part in entries])  # reads the values, which a truncated file does not have
        made_with = metadata["model"]
        said = metadata.get(CONVERSATION)
        begun = None if said is None else typed(parse_json(said), BegunConversation)
    except Exception as error:  # a file of another kind fails in any way
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); make one with mlx_lm.cache_prompt"
        ) from error
    if model not in (None, made_with):
        raise GearbxError(f"{file}: made with the model {made_with}, not {model}; name that one")
    return PromptCache(file, made_with, entries, begun, metadata.get(FINGERPRINT, ""))


@dataclass(frozen=True)
class LoadedPair:
    """Two loaded models and their figures: (small, large) each."""

    small: nn.Module
    large: nn.Module
    tokenizer: Any
    config: dict

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.small, self.large

    @property
    def vocab_size(self) -> int:
        return min(vocabulary(model) for model in self.models)

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters; quantized ones count as the weights that they stand for."""
        return parameters_of(self.models)

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes that a token reads, in the type of the checkpoint."""
        return bytes_read(self.small), bytes_read(self.large)

    def mode(self, turns: Turns, initial_gear: str, threshold: float | None = None) -> Pair:
        """Mode pair; `threshold`, in bits, replaces that of the settings."""
        bits = turns.threshold(self.vocab_size) if threshold is None else threshold
        return Pair(self.small, bits, turns.window, turns.min_duration, initial_gear=initial_gear)


def load_pair(settings: ModelSettings, small_model: str, chat_template: str = "") -> LoadedPair:
    """Both models as loaded, in the type that --dtype asks for.

    Raises:
        GearbxError: a model that cannot be loaded, or another tokenizer.
    """
    warn_of_pair(small_model, settings.model)
    large, tokenizer, config = load_model(settings, chat_template)
    small = load_small(small_model, tokenizer, trust_remote_code=settings.trust_remote_code)
    for model in (small, large):
        compute_in(model, settings.dtype, is_quantized(model))
    return LoadedPair(small, large, tokenizer, config)
