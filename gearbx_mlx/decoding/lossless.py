"""Mode lossless: a low gear drafts, the top gear verifies; the text is the top gear's (self-speculative decoding).

The mode is its settings; loop.py writes the text, drafters.py proposes tokens, policy.py says how many.
"""

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse, maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..compat.arrays import dtype_name
from ..compat.classes import generation_stream
from ..errors import GearbxError, GearbxWarning
from ..gears.gearbox import Gearbox, Observer, attached
from ..gears.in_place import own_codes, without_gears
from ..gears.ladder import DRAFT_FORMAT, EXACT_LADDER, Ladder
from ..gears.saved import saved_gears
from ..kernels.compiler import vectors_at_once
from ..kernels.device import recommended_memory
from ..kernels.dispatch import CPU, device, is_tuning, native_instructions
from ..ranks.agreement import Agreement, agreement_of
from ..routing.gates import BatchPolicy, Monitor, OneGear, highest
from ..routing.lookup import Lookup, LookupAgreement
from ..telemetry.summary import Tally, draft_rows, draft_summary
from .batches import BatchGenerator, BatchText, SharedMode
from .caches import check_draftable
from .drafters import Drafter, LowGear, OtherModel, TextSoFar
from .governor import Governor
from .loop import UNLIMITED, Loop
from .mode import encoded, vocabulary_of
from .modes import LosslessSettings
from .pair import PREFILL_STEP_SIZE, bytes_read
from .policy import (
    MOST_DRAFTED,
    MOST_ON_GPU,
    MOST_ROWS,
    USUAL_LENGTH,
    DraftPolicy,
    FixedPolicy,
    LearnedPolicy,
    draft_share,
)
from .response import GearResponse
from .rows import warn_of_other_paths
from .sampling import Chooser, LogitsReader, Processor, Sampled, Sampler, geared_responses, reader_of

OTHERS_SHARE = 0.25  # of a token of the model that one of a draft model takes, before either is measured
MENDED = 0.4  # of the rejected drafts, that a calibrated base has accepted: 0.38 to 0.54 of them in docs/convert.md
MUCH_WRITTEN = 32  # tokens: what fewer of them show is not written to the cache


@dataclass(frozen=True)
class Lossless(LosslessSettings, SharedMode):
    """Write the top gear's text, and read fewer bytes of weights for it.

    The seconds of passes and how often tokens of a margin are accepted are learned while texts are written, and kept
    for the next start; where drafts lose, the top gear goes on without. Where nothing may be measured (ranks that share
    the model, GEARBX_TUNE=0), drafts have 3 tokens.

    Args:
        settings: of `LosslessSettings`.

    Raises:
        GearbxError: a number that does not exist.
    """

    name: ClassVar[str] = "lossless"
    trace_fields: ClassVar[tuple[str, ...]] = (
        "passes",
        "weight_bytes",
        "drafted",
        "from_draft",
        "looked_up",
        "source",
    )
    uncapped: ClassVar[str] = "writes the top gear's text, which a cap would change"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draft_length", "lookup_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and type(tokens) is not int:
                raise GearbxError(f"{name} is {tokens!r}; give a whole number of tokens")

    @property
    def most_looked_up(self) -> int:
        """The most tokens that the text itself may propose at once."""
        if self.lookup_tokens is not None:
            return self.lookup_tokens
        return MOST_DRAFTED if self.draft_length is None else 0

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Gearbox | Observer | None:
        """Like Mode's; a new one on a GPU has gears that MLX's own kernels compute fast."""
        if gearbox is None and attached(model) is None and device() != CPU and not without_gears(model):
            gearbox = gearbox_of_mlx(model)
        return super().gearbox_for(model, gearbox)

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        warn_of_other_paths(gearbox)
        tokens = np.array(encoded(tokenizer, prompt), int).reshape(-1).tolist()
        source = responses(self, gearbox, tokenizer, tokens, **kwargs)
        return geared_responses(source, gearbox, Monitor(vocabulary_of(gearbox), self.window), controller)

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> BatchGenerator:
        """Like Mode's. The top gear writes all texts, whatever the policy; drafts pay for one text at a time."""
        return BatchGenerator(model, tokenizer, gearbox, self, highest, **kwargs)

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """Return what one text of a batch has of its own."""
        top = gearbox.ladder.top
        return BatchText(OneGear(top.index), Monitor(vocabulary_of(gearbox), self.window), top, top)

    def drafter(self, gearbox: Gearbox, chooser: Chooser) -> LowGear | None:
        """Return the low gear that drafts, the lowest if none is named; None where there is one gear alone.

        Raises:
            GearbxError: the top gear of several.
        """
        ladder = gearbox.ladder
        gear = ladder[0] if self.draft is None else ladder.find(self.draft)
        if gear == ladder.top and len(ladder) > 1:
            raise GearbxError(f"gears {ladder}: the top gear cannot draft for itself; give a lower one too")
        if gear == ladder.top:
            return None
        gearbox.make(gear)  # and not in the middle of the text
        return LowGear(gearbox, gear, chooser, reader_of(gearbox), agreement_of(gearbox.model))

    def learned(self, gearbox: Gearbox, drafter: Drafter | None, chooser: Chooser) -> "Learned":
        """Return what decides how much to propose with a gearbox.

        Where nothing may be measured, drafts have always the same length: with ranks, whose clocks differ, and with
        GEARBX_TUNE=0.
        """
        if self.draft_length is not None or not is_tuning() or agreement_of(gearbox.model).group is not None:
            return Learned(FixedPolicy(self.draft_length or USUAL_LENGTH), LookupAgreement())
        return learned(gearbox, drafter, chooser)

    def about(self) -> str:
        looked_up = f"up to {self.most_looked_up} tokens at once" if self.most_looked_up else "nothing"
        drafts = "drafts save time"
        if self.draft_length is not None:
            drafts = f"drafts of {self.draft_length} token{'s' * (self.draft_length != 1)}"
        return f"lossless: {drafts}; lookup proposes {looked_up}"

    def summary(self, tally: Tally) -> dict[str, Any]:
        return draft_summary(tally, verifications=list(tally.passes.values())[-1])  # by the top gear

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary) + speed_rows(summary)


@dataclass
class Learned:
    """What is learned while texts are written: how much to draft, and how often the text itself proposes right.

    Attributes:
        keep: writes what is known down for the next start.
        written: tokens since then.
    """

    policy: DraftPolicy
    lookup: LookupAgreement
    keep: Callable[[Mapping[str, float]], None] = lambda state: None
    written: int = 0

    def note(self, tokens: int) -> None:
        """Take a text of so many tokens."""
        self.written += tokens
        if self.written >= MUCH_WRITTEN:
            self.written = 0
            self.keep(self.policy.state)


LEARNED: WeakKeyDictionary[Gearbox, dict[str, Learned]] = WeakKeyDictionary()  # nothing here may refer to the gearbox


def learned(gearbox: Gearbox, drafter: Drafter | None, chooser: Chooser) -> Learned:
    """Return what is learned with a gearbox; what earlier starts on this machine learned begins it.

    Drafts of a sampler without a kernel take longer and know no margins, so that what is learned with either says
    nothing about the other.
    """
    known, name = LEARNED.setdefault(gearbox, {}), name_of(gearbox, drafter, chooser)
    if name not in known:
        cache = gearbox.kernel_choices.tuner.cache
        kept = {} if gearbox.kernels.again else cache.times.get(name, {})
        share = None if drafter is None else OTHERS_SHARE
        if isinstance(drafter, LowGear):
            share = draft_share(drafter.gear.bits, gearbox.ladder.top.bits)

        def keep(state: Mapping[str, float]) -> None:
            cache.keep(name, dict(state))
            cache.save_soon()

        most = MOST_DRAFTED if device() == CPU else MOST_ON_GPU
        tile = vectors_at_once(native_instructions()) if gearbox.kernels.native else MOST_ROWS
        known[name] = Learned(LearnedPolicy(kept, share, most, tile), LookupAgreement(), keep)
    return known[name]


def measured_seconds(gearbox: Gearbox | Observer) -> dict[str, float]:
    """Return the fields of a summary that say what a token took in rounds and by the top gear alone, in this process.

    They are left out where too few of either were seen.
    """
    found: dict[str, float] = {}
    for known in LEARNED.get(gearbox, {}).values() if isinstance(gearbox, Gearbox) else ():
        rounds, alone = known.policy.round_seconds, known.policy.alone_seconds
        if rounds is not None and alone is not None:
            found = {"seconds_in_rounds": rounds, "seconds_alone": alone}
    return found


def gain_of_calibration(gearbox: Gearbox | Observer) -> float | None:
    """Return how many times as fast texts would be with a calibrated base, as the policy of this process estimates.

    None where it knows too little of this run.
    """
    found = LEARNED.get(gearbox, {}).values() if isinstance(gearbox, Gearbox) else ()
    gains = [gain for known in found if (gain := known.policy.gain(MENDED)) is not None]
    return max(gains, default=None)


def speed_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Compare rounds with the top gear alone as a line of a table, where this run has seen both."""
    rounds, alone = summary.get("seconds_in_rounds"), summary.get("seconds_alone")
    if not rounds or not alone or not summary.get("drafted"):
        return []
    times = f"{1000 * rounds:.3g} ms a token in rounds, {1000 * alone:.3g} by the top gear alone in between"
    return [("speed", f"{alone / rounds:.2f} times as fast with drafts: {times}")]


def name_of(gearbox: Gearbox, drafter: Drafter | None, chooser: Chooser) -> str:
    """Return what times of drafts depend on beside the machine, as a key of the cache."""
    kernels = "native" if gearbox.kernels.native else "mlx"
    if gearbox.base:
        kernels += ", calibrated,"
    if gearbox.kernels.x_bits:
        kernels += f" with activations of {gearbox.kernels.x_bits} bits"
    how = f"{gearbox.format.name}, {dtype_name(gearbox.compute_dtype)}, {kernels} kernels"
    if not chooser.has_kernel:
        how += ", another sampler"
    by = "another model" if drafter is not None else "the text"
    if isinstance(drafter, LowGear):
        by = f"{drafter.gear.bits} bits"
    return f"drafts by {by} for {gearbox.ladder.top.bits} bits, model {gearbox.fingerprint[:8]}, {how}"


def gearbox_of_mlx(model: nn.Module) -> Gearbox:
    """Return the gears of a model for MLX's kernels: as a checkpoint has them, or 4 bits beside original weights."""
    codes = own_codes(model)
    if codes is not None:
        return Gearbox(model, Ladder([codes.bits]))
    return Gearbox(model) if saved_gears(model) is not None else Gearbox(model, EXACT_LADDER, format=DRAFT_FORMAT)


def responses(
    mode: Lossless,
    gearbox: Gearbox,
    tokenizer: Any,
    prompt: list[int],
    max_tokens: int = 256,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[Processor] | None = None,
    prompt_cache: list[Any] | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
) -> Sampled:
    """Yield mlx-lm's responses for a text, and what the sampler saw of each; keywords as in mlx-lm's stream_generate.

    Args:
        prompt: tokens.
        num_draft_tokens: the most tokens that a draft model drafts at once.

    Raises:
        GearbxError: a gear that cannot draft; a draft model whose KV cache cannot be cut.
    """
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    text, layers = begun(prompt, tokenizer, max_tokens, input_embeddings), len(gearbox.model.layers)
    given = make_prompt_cache(gearbox.model, max_kv_size) if prompt_cache is None else prompt_cache
    chooser = Chooser(sampler or greedy_sampler, tuple(logits_processors or ()))
    reader, agreement = reader_of(gearbox), agreement_of(gearbox.model)
    cache = given if draft_model is None else given[:layers]
    other = other_model(draft_model, given[layers:], text, chooser, reader, agreement)
    drafter = other or mode.drafter(gearbox, chooser)
    known = mode.learned(gearbox, drafter, chooser)
    quantized = {"quantized_kv_start": quantized_kv_start, "kv_group_size": kv_group_size, "kv_bits": kv_bits}
    loop = Loop(
        gearbox,
        cache,
        text,
        chooser,
        known.policy,
        reader,
        drafter,
        Lookup(known.lookup) if mode.most_looked_up else None,
        mode.most_looked_up,
        agreement,
        MOST_DRAFTED if draft_model is None else min(num_draft_tokens or MOST_DRAFTED, MOST_DRAFTED),
        quantize=partial(maybe_quantize_kv_cache, **quantized),
        quantized_from=UNLIMITED if kv_bits is None else quantized_kv_start,
        keeps_cache=prompt_cache is not None,
        stream=generation_stream(),
        prefill_step=prefill_step_size,
        told=prompt_progress_callback or (lambda read, tokens: None),
        embeddings=input_embeddings,
    )
    return spoken(loop, tokenizer, known)


def other_model(
    model: nn.Module | None,
    cache: list[Any],
    text: TextSoFar,
    chooser: Chooser,
    reader: LogitsReader,
    agreement: Agreement,
) -> Drafter | None:
    """Return a draft model, if there is one, with its KV cache; None, with a warning, where that cannot be cut."""
    if model is None:
        return None
    cache = cache or make_prompt_cache(model)
    try:
        check_draftable(cache, text.prompt + text.room + MOST_DRAFTED)
    except GearbxError as error:
        warnings.warn(f"{error}; it drafts nothing", GearbxWarning, stacklevel=5)
        return None
    return OtherModel(model, cache, chooser, reader, bytes_read(model), agreement)


def begun(prompt: list[int], tokenizer: TokenizerWrapper, max_tokens: int, embeddings: mx.array | None) -> TextSoFar:
    """Return a text that has its prompt. Raises ValueError as mlx-lm does: no prompt, or no room for a token."""
    if max_tokens == 0:
        raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    if embeddings is not None and not prompt:
        prompt = [0] * len(embeddings)  # the model reads no tokens then
    if not prompt:
        raise ValueError("Either input_embeddings or prompt (or both) must be provided.")
    return TextSoFar(prompt, frozenset(tokenizer.eos_token_ids), math.inf if max_tokens < 0 else max_tokens)


def spoken(loop: Loop, tokenizer: TokenizerWrapper, known: Learned) -> Sampled:
    """Yield the tokens of a loop as mlx-lm's stream_generate does, and what the sampler saw of each."""
    text, detokenizer = loop.text, tokenizer.detokenizer
    with contextlib.ExitStack() as writing:
        writing.callback(lambda: known.note(len(text.tokens) - text.prompt))
        held = [] if recommended_memory() is None else loop.gearbox.arrays()
        with contextlib.redirect_stdout(sys.stderr):  # on which mlx-lm warns of a model that is too large
            writing.enter_context(wired_limit(held, [loop.stream]))
        tokens = writing.enter_context(contextlib.closing(loop.write()))
        start = time.perf_counter()
        for count, written in enumerate(tokens, 1):
            if count == 1:
                prompt_tps = text.prompt / (time.perf_counter() - start)
                start = time.perf_counter()
            stopped, over = written.token in text.ends, text.ends_with(count)
            if not stopped:
                detokenizer.add_token(written.token)
            if over:
                detokenizer.finalize()
                next(tokens, None)  # the loop leaves the cache as mlx-lm would
            response = GenerationResponse(
                text=detokenizer.last_segment,
                token=written.token,
                logprobs=written.logprobs,
                from_draft=False,
                prompt_tokens=text.prompt,
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=("stop" if stopped else "length") if over else None,
            )
            yield response, written.seen
