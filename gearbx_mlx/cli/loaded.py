"""A model loaded and put into gears as `Decision` says, with what every command needs of it then."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from ..bit_selection.precision import PrecisionManifest, fitted_to
from ..compat.templates import confine
from ..decoding.caches import KeptCache, check_heads, check_prompt_cache, plain_cache
from ..decoding.governor import Governor, MemoryGuard
from ..decoding.mode import Mode
from ..decoding.modes import PAIR, TELEMETRY_ONLY, made
from ..decoding.pair import bytes_read
from ..decoding.sampling import sampler_for
from ..decoding.stream import parameters_of
from ..errors import GearbxError, GearbxWarning, about, one_line
from ..files.reading import parse_json, shown, typed
from ..files.writing import replacing_arrays
from ..formats import get_format
from ..gears.cost import ModelFiles, needed_memory, read_files
from ..gears.discovery import is_quantized, vocabulary
from ..gears.gearbox import Gearbox, Observer, in_one_gear, model_fingerprint
from ..gears.in_place import own_codes, without_gears
from ..gears.kernel_choices import measure_gears
from ..gears.ladder import DENSE, EXACT_FORMAT, EXACT_LADDER, Ladder
from ..gears.mapped import active_memory
from ..gears.saved import saved_gears
from ..kernels import MEASURE, metal
from ..kernels.device import recommended_memory, whole_memory
from ..kernels.dispatch import on_cpu
from ..kernels.tuner import FAILED
from ..loading import DEMO_MODEL, find, is_packed, load, load_small, model_name
from ..machine.readers import OwnMemory, Reader, Scripted, Watch, this_machine
from ..ranks.place import current
from ..settings import flag_of, human_bytes
from .bases import Base, find_base
from .decide import Decision, decide, governed
from .flags import CacheSettings, GearedSettings, ModelSettings, SamplingSettings, check_sampling
from .tables import kernels_table
from .terminal import messages, note, show_compiling, show_encoding, show_keeping, spinner

SLOW_MAKING = 5.0  # seconds that gears take to be made, from which on a geared checkpoint is worth its disk


@dataclass(frozen=True)
class Loaded:
    """A model as loaded, before anything takes long, and how it is to run."""

    decision: Decision
    model: nn.Module
    tokenizer: Any
    config: dict

    @classmethod
    def of(cls, settings: GearedSettings, chat_template: str = "", several_modes: bool = False) -> "Loaded":
        """Return the model without gears as yet. Raises GearbxError as `decide` and `load_model`.

        Args:
            chat_template: replaces the tokenizer's.
            several_modes: as of `decide`.
        """
        decision = decide(settings, None, several_modes)
        if not decision.observes:
            check_limit(decision)
            check_fits_memory(decision)
        # Codes that are split as they are read take no memory twice.
        lazy = not decision.observes and current() is None and is_packed(settings.model.model)
        model, tokenizer, config = load_model(settings.model, chat_template, lazy)
        decision = decide(settings, model, several_modes)
        if lazy and not decision.codes and decision.saved is None:
            mx.eval(model.parameters())
        return cls(decision, model, tokenizer, config)

    @property
    def name(self) -> str:
        return model_name(self.decision.settings.model.model)

    def in_gears(self) -> "Geared":
        """Return the model with its gearbox. Raises GearbxError for gears that do not fit the model."""
        decision = self.decision
        settings = decision.settings
        if settings.cache.kv_gears is not None:
            check_heads(self.model, settings.cache.kv_gears)
        if decision.note:
            note(decision.note)
        if decision.mode_by == "target_tps":
            note(
                f"with --target-tps the text is a mixture of gears (mode {decision.mode.name}), and not the top "
                "gear's; leave it out for mode lossless"
            )
        found = find_base(decision, self.model, self.tokenizer) if decision.takes_base else None
        if found is not None:
            decision = replace(decision, why=f"{decision.why}; the lowest gear's codes are calibrated")
        gearbox = make_gearbox(decision, self.model, found)
        if is_mlx_lm(gearbox) and settings.gears.kernels.name == "auto":
            note(
                f"--gears {DENSE} is mlx-lm bit for bit, with MLX's kernels, which are slow on a CPU; --kernels native "
                "is many times as fast, and rounds otherwise"
            )
        if isinstance(gearbox, Observer) and not decision.codes and settings.mode.mode != TELEMETRY_ONLY:
            note(
                f"{self.name} is quantized and divided between ranks: telemetry only, no layer changes gear; "
                "of what gearbx_mlx convert makes of it, ranks can divide the gears"
            )
        elif decision.codes and decision.observes:
            note(f"{self.name} changes no gear in mode {TELEMETRY_ONLY}; other modes use its {decision.codes}")
        elif decision.codes:
            note(f"{self.name} is quantized to {decision.codes}")
        return Geared(replace(self, decision=decision), gearbox)

    def check_gears(self) -> None:
        """Raises GearbxError for a quantized model whose codes have one gear."""
        codes = self.decision.codes
        if without_gears(self.model) or (codes and len(self.decision.ladder) == 1):
            told = f" ({codes})" if codes else ""
            raise GearbxError(f"{self.name}: is quantized already and has no gears to compare{told}; give the original")

    def gearbox(self) -> Gearbox:
        """Like `in_gears`. Raises GearbxError for a model that has no gears, too."""
        self.check_gears()
        gearbox = self.in_gears().gearbox
        assert isinstance(gearbox, Gearbox)
        return gearbox


def is_mlx_lm(gearbox: Gearbox | Observer) -> bool:
    """Return whether a model in its original weights alone computes on a CPU as mlx-lm does."""
    return isinstance(gearbox, Gearbox) and gearbox.ladder[0].dense and not gearbox.kernels.native and on_cpu()


@dataclass(frozen=True)
class Geared:
    """A loaded model with its gearbox, or with an observer where nothing shifts."""

    loaded: Loaded
    gearbox: Gearbox | Observer

    def mode(self, typed: str, mode: Mode | None = None) -> Mode:
        """Return the mode for a prompt, as typed; `mode` replaces that of the flags."""
        return (mode or self.loaded.decision.mode).begun(typed, self.gearbox.ladder)

    def why(self) -> str:
        """Return which gears, format and kernels run, and what decided about them, in one sentence."""
        decision, gearbox = self.loaded.decision, self.gearbox
        if not isinstance(gearbox, Gearbox):
            return f"gears {gearbox.ladder} are only named: no layer changes gear"
        kernels = "native kernels" if gearbox.kernels.native else f"MLX's kernels ({gearbox.kernels.reason})"
        by = f" (by {flag_of(decision.mode_by)})" if decision.mode_by else ""
        return (
            f"gears {gearbox.ladder} in format {gearbox.format.name}, {kernels}: {decision.why}; "
            f"mode {decision.mode.name}{by}"
        )

    def of_making(self) -> str:
        """Return what makes later starts faster, where making the gears took long; "" elsewhere."""
        gearbox, decision = self.gearbox, self.loaded.decision
        if not isinstance(gearbox, Gearbox) or decision.saved or decision.codes or gearbox.making_seconds < SLOW_MAKING:
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
            verbose: print which readers of this machine work.

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
        if limit is not None and not governed(settings, decision.mode.name):
            yield MemoryGuard(self.gearbox, own_memory(limit))
            return
        order: dict[str, Any] = {}  # of the layers to cap
        if decision.precision is not None:
            order = {"sensitivity": decision.precision.sensitivity, "bounds": decision.precision.bounds}
        own = [] if limit is None else [own_memory(limit)]
        with make_watch(own, target is not None, verbose) as watch:
            yield Governor(self.gearbox, target or None, watch=watch, **order)


def make_gearbox(decision: Decision, model: nn.Module, base: Base | None = None) -> Gearbox | Observer:
    """Return a gearbox with everything that was asked for; an observer for a model without gears.

    Raises:
        GearbxError: gears that do not fit the model.
    """
    settings = decision.settings
    name, dtype, gears = settings.model.model, settings.model.dtype, settings.gears
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
        checkpoint=find(name or DEMO_MODEL) if residency == "disk" else None,
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
            by = "is not a number" if difference == FAILED else f"differs from MLX's by {difference:.2g} times its size"
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
    with about(file):
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


def make_watch(own: Sequence[Reader], machine: bool, verbose: bool) -> Watch:
    """Reads the machine's state, or one that a file plays; prints which readers work, and why the others do not.

    Args:
        own: readers of this process, which are read in any case.
        machine: read this machine too.
    """
    script = os.environ.get("GEARBX_MACHINE")
    if script:
        return Watch([Scripted.from_file(script), *own])
    if not machine:
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


def check_limit(decision: Decision) -> None:
    """Raises GearbxError where a limit of memory is below what the files say that one gear takes."""
    settings = decision.settings
    limit, name = settings.gears.residency.limit, settings.model.model
    files = None if limit is None else files_of(name)
    if limit is None or files is None:
        return
    needed = memory_with(files, decision, False)
    if needed > limit:
        raise GearbxError(
            f"--residency disk:{human_bytes(limit)}: {model_name(name)} takes about {human_bytes(needed)} in its "
            "largest gear alone; give more, or fewer --gears"
        )


def check_fits_memory(decision: Decision) -> None:
    """Warn of a model that does not fit before a weight of it is read, and name what would fit.

    Raises:
        GearbxError: a Mac has less memory than the model.
    """
    name, residency = decision.settings.model.model, decision.settings.gears.residency.name
    files = None if residency == "stream" else files_of(name)
    if files is None:
        return
    # Of an original or quantized checkpoint all is read.
    least = files.total if files.manifest is None else memory_with(files, decision, False)
    whole, most = whole_memory(), recommended_memory()
    if least > whole:
        sizes = f"has {human_bytes(least)} of weights, and this machine {human_bytes(whole)} of memory"
        if metal.available():
            raise GearbxError(f"{model_name(name)}: {sizes}; give a checkpoint in fewer bits, or a smaller model")
        warnings.warn(
            f"{model_name(name)} {sizes}: expect it to be slow, or ended by the system", GearbxWarning, stacklevel=3
        )
    if most is None:
        return
    drafts = decision.drafts and not files.is_quantized
    decision, resident = decision.with_draft() if drafts else decision, residency == "resident"
    needed = memory_with(files, decision, resident)
    if needed <= most:
        return
    remedies: list[str] = []
    if drafts:
        remedies = without_draft(files, decision, most)
    elif not files.is_quantized:
        remedies = remedies_that_fit(files, decision, most, resident)
    advice = f"{' or '.join(remedies)} would fit" if remedies else "expect it to be slow"
    warn_of_memory(model_name(name), needed, most, advice)


def without_draft(files: ModelFiles, decision: Decision, most: int) -> list[str]:
    """Other ways to run a model that a draft beside it would make too large, and what each takes."""
    ways = {"--gears 16": ("planes", "16"), "--mode static --gears 8": ("planes", "8")}
    if all(entry.dtype == "BF16" for entry in files.matrices.values()):
        ways["--format exact"] = (EXACT_FORMAT, EXACT_LADDER)
    ways["a checkpoint in 4 bits"] = ("planes", "4")
    needed = {
        what: memory_with(files, replace(decision, format=get_format(format), ladder=Ladder.parse(gears)), True)
        for what, (format, gears) in ways.items()
    }
    return [f"{what} ({human_bytes(size)})" for what, size in needed.items() if size <= most]


def warn_of_pair(small: str, large: str | None) -> None:
    """Like `check_fits_memory`, of two models that are in memory together."""
    most = recommended_memory()
    found = [] if most is None else [files_of(small), files_of(large)]
    needed = sum(files.total for files in found if files is not None)
    if most is not None and needed > most:
        warn_of_memory(f"the pair of {small} and {model_name(large)}", needed, most, "give quantized models")


def warn_of_memory(what: str, needed: int, most: int, advice: str) -> None:
    sizes = f"needs about {human_bytes(needed)}, and this GPU should have at most {human_bytes(most)}"
    warnings.warn(f"{what} {sizes}: {advice}", GearbxWarning, stacklevel=3)


def files_of(model: str | None) -> ModelFiles | None:
    """Return what the headers of a model's files say; None where they cannot be read: `load` says what is wrong with
    them."""
    try:
        return read_files(find(model or DEMO_MODEL))
    except (GearbxError, OSError):
        return None


def memory_with(files: ModelFiles, decision: Decision, resident: bool) -> int:
    """Return bytes that a model in these gears needs, idle gears with it or not."""
    bits = [gear.bits for gear in decision.ladder]
    return needed_memory(files, bits, decision.format, decision.group_size, resident)


def remedies_that_fit(files: ModelFiles, decision: Decision, most: int, resident: bool) -> list[str]:
    """Changes that make it fit: the most gears from the lowest on, and the residency that has one gear in memory."""
    found = []
    bits = [gear.bits for gear in decision.ladder]
    can_drop = not decision.format.ladders or files.manifest is not None
    for count in range(len(bits) - 1, 0, -1) if can_drop else ():
        fewer = replace(decision, ladder=Ladder(bits[:count]))
        needed = memory_with(files, fewer, resident)
        if needed <= most:
            found.append(f"--gears {fewer.ladder} ({human_bytes(needed)})")
            break
    if resident and can_drop and memory_with(files, decision, False) <= most:
        found.append("--residency disk")
    return found


def load_model(settings: ModelSettings, chat_template: str = "", lazy: bool = False) -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration. A `chat_template` replaces the tokenizer's. lazy: weights are not read yet.

    Raises:
        GearbxError: as `load`; an end-of-text token that the vocabulary does not have.
    """
    confine()
    trusted = settings.trust_remote_code
    keywords: dict[str, Any] = {"trust_remote_code": trusted, "adapter_path": settings.adapter_path, "lazy": lazy}
    if chat_template:
        keywords["tokenizer_config"] = {"chat_template": chat_template}
    run = current()
    if run is not None:
        keywords |= {"group": run.group, "pipeline": os.environ.get("GEARBX_PIPELINE") == "1"}
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
        """Return what stands before the message in the template's place; "" where the cache is all that is
        known of it."""
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
        """Return the tokens that the cache does not have, and the caches that go on with them.

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
    """Return a prompt cache; None without a file.

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
        return made(PAIR, {**flags, "small_model": self.small})


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
