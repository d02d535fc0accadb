"""Python interface: mlx-lm's stream_generate, generate and batch_generate, with gears; summaries of runs."""

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse, generate_step, speculative_generate_step
from mlx_lm.generate_utils import BatchStats
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from ..compat.arrays import dtype_name
from ..errors import GearbxError, choose
from ..gears.activations import model_dtype, stored_dtype
from ..gears.gearbox import Gearbox, Observer, attached
from ..gears.in_place import without_gears
from ..gears.ladder import check_kv_gears
from ..gears.mapped import mapped_bytes
from ..gears.saved import saved_gears
from ..gears.streaming import Stream
from ..kernels.device import check_device
from ..ranks.agreement import agreement_of
from ..routing.gates import DEFAULT_POLICY, BatchPolicy, policy_named
from ..routing.pair import NAMES, parameter_ratio
from ..telemetry.summary import Tally, kv_summary, summarize, whole_command
from .batches import is_whole_number
from .caches import cache_in_gears, check_kv_mode, check_quantizable
from .governor import Governor, MemoryGuard
from .learned import measured_seconds
from .mode import Mode, check_known, creation_lock, decode_lock, encoded, vocabulary_of
from .modes import LOSSLESS, ROUTE, STATIC, TELEMETRY_ONLY, check_draft_model, mode_class
from .pair import Pair, bytes_read
from .response import BatchGearResponse, GearResponse, TokenTelemetry
from .sampling import Sampler, sampler_beside

NO_LOGPROBS = mx.zeros(0)
# Fields of a batch's response that a single sequence's response has too.
SHARED = {item.name for item in fields(TokenTelemetry)} | {"token", "finish_reason", "from_draft"}


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    *,
    mode: Mode | str | None = None,
    gearbox: Gearbox | Observer | None = None,
    controller: Governor | MemoryGuard | None = None,
    kv_gears: str | Sequence[int] | None = None,
    kv_gear: int | None = None,
    **kwargs: Any,
) -> "Responses":
    """Generate a sequence while the gearbox changes the precision of the weights.

    Several sequences, also in several threads, may share a gearbox: they take turns, and each returns to its gear.

    Args:
        model, tokenizer, prompt, max_tokens: as in `mlx_lm.stream_generate`, as are all other keywords.
        mode: Route, Kickdown, Lossless, Pair, Static or TelemetryOnly, such as `Lossless(draft=4)`, or a name for
            default settings. None: Lossless; TelemetryOnly for an Observer, Static for a ladder of only 16 bits without
            a draft_model, Route for a controller that caps.
        gearbox: None: the model's, else a new one with the default ladder; an Observer for telemetry-only.
        controller: for route and kickdown a Governor, which caps the gears by speed and by the machine's state; for
            other modes a MemoryGuard.
        kv_gears: bits of the KV cache's gears, such as "4,16" (docs/kv_gears.md); changes a `prompt_cache` in place.
        kv_gear: bits of the KV cache gear that all passes read; None: it follows the gear of the weights.

    Returns:
        Responses: an iterator of a GearResponse per token; its `summary()` is the run so far.

    Raises:
        GearbxError: arguments that do not fit together; tokens outside the vocabulary; a gearbox of a different device.
    """
    started = time.perf_counter()
    check_keywords(kwargs)
    drafted, governed = kwargs.get("draft_model") is not None, controller is not None and controller.caps
    if controller is not None and gearbox is None:
        gearbox = controller.gearbox
    chosen = mode_or_default(model, gearbox, mode, governed, drafted)
    if controller is not None:
        chosen.check_controller(controller, gearbox)
    check_draft_model(chosen.name, kwargs.get("draft_model"))
    with creation_lock:
        box = chosen.gearbox_for(model, gearbox)
    kwargs |= cache_keywords(chosen, model, box, kv_gears, kv_gear, kwargs)
    if box is not None:
        check_known("prompt", encoded(tokenizer, prompt), vocabulary_of(box))
        check_device(box.device)
        kwargs["sampler"] = sampler_beside(box, kwargs.get("sampler"))
    keywords = {"gearbox": box, "controller": controller, "max_tokens": max_tokens, **kwargs}
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    with lock_of(box):
        responses = chosen.stream(model, tokenizer, prompt, **keywords)
    return Responses(responses, model, chosen, box, controller, kwargs.get("draft_model"), started)


def lock_of(gearbox: Gearbox | Observer | None) -> contextlib.AbstractContextManager:
    """Return the lock of a gearbox; a pair, without a gearbox, has none."""
    return contextlib.nullcontext() if gearbox is None else decode_lock(gearbox)


LEAST = {"prefill_step_size": 1, "num_draft_tokens": 1, "max_kv_size": 5}  # a rotating cache keeps the first 4 tokens
KEYWORDS = {*inspect.signature(generate_step).parameters, *inspect.signature(speculative_generate_step).parameters}


def check_keywords(given: Mapping[str, Any]) -> None:
    """Validate keywords of mlx-lm. Raises GearbxError for unknown ones; for those of sampling it names make_sampler."""
    for name, least in LEAST.items():
        if given.get(name) is not None and not is_whole_number(given[name], least):
            raise GearbxError(f"{name}: must be {least} or more, got {given[name]!r}; set a larger number")
    for name in given.keys() - KEYWORDS:
        if name in inspect.signature(make_sampler).parameters:
            hint = f"use sampler=mlx_lm.sample_utils.make_sampler({name}={given[name]!r})"
        else:
            hint = choose(name, sorted({*KEYWORDS, *inspect.signature(stream_generate).parameters}))
        raise GearbxError(f"stream_generate: has no keyword '{name}'; {hint}")


def generate(model: nn.Module, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    """Return the whole output, with the keywords of stream_generate. `verbose` prints it during generation, and
    mlx-lm's statistics."""
    text = ""
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print(f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def mode_or_default(
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    mode: Mode | str | None,
    governed: bool = False,
    draft_model: bool = False,
) -> Mode:
    """Return the named mode, or by default lossless, or the mode for an observer or a controller.

    Without a draft model, a ladder of only 16 bits has mode static, whose output is mlx-lm's bit for bit.

    Args:
        governed: whether a controller caps the gears.
        draft_model: whether a second model drafts.

    Raises:
        GearbxError: an unknown mode.
    """
    if isinstance(mode, Mode):
        return mode
    if mode is None:
        box, saved = gearbox or attached(model), saved_gears(model)
        described = box if box is not None or saved is None else saved.manifest
        if isinstance(box, Observer) or (box is None and without_gears(model)):
            mode = TELEMETRY_ONLY
        elif governed:
            mode = ROUTE
        elif described is not None and described.ladder[0].dense and not draft_model:
            mode = STATIC
        else:
            mode = LOSSLESS
    return mode_class(mode)()


def cache_keywords(
    mode: Mode,
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    bits: str | Sequence[int] | None,
    fixed: int | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Validate the keywords of the KV cache, and return `prompt_cache` if the cache has gears; {} otherwise.

    Raises:
        GearbxError: gears that do not fit the mode, the other keywords or the model; `kv_bits` for a model whose cache
            cannot be quantized.
    """
    kv_bits, draft_model, size = kwargs.get("kv_bits"), kwargs.get("draft_model"), kwargs.get("max_kv_size")
    check_kv_gears(bits, fixed, kv_bits, draft_model)
    for each in (model, getattr(mode, "small_model", None), draft_model):
        if each is not None and kv_bits is not None:
            check_quantizable(each, kv_bits, kwargs.get("kv_group_size", 64), size)
    if bits is None:
        return {}
    check_kv_mode(mode.name, fixed)
    return {"prompt_cache": cache_in_gears(model, gearbox, bits, fixed, kwargs.get("prompt_cache"), size)}


@dataclass
class GearedBatchResponse(BatchResponse):
    """mlx-lm's response, and the trace of each sequence: a GearResponse per token, without its distribution."""

    traces: list[list[GearResponse]] = field(default_factory=list)


def batch_generator(
    model: nn.Module,
    tokenizer: Any,
    *,
    mode: Mode | str | None = None,
    gearbox: Gearbox | Observer | None = None,
    batch_policy: str | BatchPolicy = DEFAULT_POLICY,
    **kwargs: Any,
) -> Any:
    """Return mlx-lm's BatchGenerator in gears, for sequences that join and leave at any step.

    Its `insert` takes `seeds=` as well; its `next` returns BatchGearResponses.

    Args:
        mode, gearbox: as in `stream_generate`.
        batch_policy: chooses the gear of a step from the requested gears: "highest", "most" (the most requested),
            "quantile:Q" (the lowest that is enough for a share Q of them), or a function of the gears' numbers.
        kwargs: of mlx-lm's BatchGenerator.

    Raises:
        GearbxError: a mode for single sequences, an unknown policy, a model whose KV caches cannot be shared.
    """
    policy = policy_named(batch_policy)
    chosen = mode_or_default(model, gearbox, mode)
    with creation_lock:
        box = chosen.gearbox_for(model, gearbox)
    if agreement_of(model).group is not None:  # ranks do not synchronize their batches
        raise GearbxError("batch: is not available for a model shared by ranks; use stream_generate for each prompt")
    if box is not None:
        check_device(box.device)
    return chosen.batch_generator(model, tokenizer, gearbox=box, policy=policy, **kwargs)


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    prompt_caches: list[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    samplers: Sequence[Sampler | None] | None = None,
    logits_processors: Sequence[Any] | None = None,
    seeds: Sequence[int | None] | None = None,
    **kwargs: Any,
) -> GearedBatchResponse:
    """Generate a sequence for each prompt, with shared passes over the weights.

    In one gear, each sequence is identical to `stream_generate`'s for its prompt.

    Args:
        model, ..., return_logprobs: as in `mlx_lm.batch_generate`; prompts may be strings too.
        samplers: one per prompt; None: `sampler=`.
        logits_processors: of all sequences, or a list of them per prompt.
        seeds: per prompt; the sequence is then identical to a single one after `mx.random.seed(seed)`.
        kwargs: of `batch_generator`: mode, gearbox, batch_policy, sampler, and mlx-lm's keywords.

    Raises:
        GearbxError: no prompts, an empty one or one beyond the context; no room for a token; lists of unlike length.
    """
    if isinstance(prompts, str):
        raise GearbxError("prompts: must be a list, got one string; pass a list of strings")
    if not len(prompts):
        raise GearbxError("prompts: must not be empty; pass one prompt or more")
    tokens = [encoded(tokenizer, prompt) for prompt in prompts]
    most = list(max_tokens) if isinstance(max_tokens, Sequence) else [max_tokens] * len(tokens)
    own = {"samplers": samplers, "logits_processors": per_sequence(logits_processors, len(tokens)), "seeds": seeds}
    generator = batch_generator(model, tokenizer, **kwargs)
    try:
        uids = generator.insert(tokens, most, prompt_caches, **own)
        sequences = {uid: BatchSequence(tokenizer, prompt) for uid, prompt in zip(uids, tokens)}
        stats = run_batch(generator, sequences, return_logprobs, verbose)
    finally:
        generator.close()
    ordered = [sequences[uid] for uid in uids]
    return GearedBatchResponse(
        [text.text for text in ordered],
        stats,
        [text.cache for text in ordered] if return_prompt_caches else None,
        [text.tokens for text in ordered] if return_token_ids else None,
        [text.logprobs for text in ordered] if return_logprobs else None,
        [text.trace for text in ordered],
    )


class BatchSequence:
    """One sequence of a batch during generation: its tokens and their responses."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self.detokenizer, self.prompt_tokens = tokenizer.detokenizer, len(prompt)
        self.trace: list[GearResponse] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.cache: list[Any] | None = None

    def add(self, response: BatchGearResponse, with_logprob: bool) -> None:
        """Add a token. Raises the error that ended the sequence without a valid token."""
        if response.error is not None:
            raise response.error
        if response.finish_reason != "stop":
            self.detokenizer.add_token(response.token)
            self.tokens.append(response.token)
            if with_logprob:
                self.logprobs.append(response.logprobs[response.token].item())
        if response.finish_reason is not None:
            self.detokenizer.finalize()
            self.cache = response.prompt_cache
        self.trace.append(as_single(response, self.detokenizer.last_segment, self.prompt_tokens, len(self.trace) + 1))

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.trace)


def as_single(response: BatchGearResponse, text: str, prompt_tokens: int, generation_tokens: int) -> GearResponse:
    """Return a batch's response for a token as a response of `stream_generate`, without its distribution and speeds."""
    return GearResponse(
        text=text,
        logprobs=NO_LOGPROBS,
        prompt_tokens=prompt_tokens,
        prompt_tps=0.0,
        generation_tokens=generation_tokens,
        generation_tps=0.0,
        peak_memory=0.0,
        **{name: value for name, value in vars(response).items() if name in SHARED},
    )


def run_batch(generator: Any, sequences: Mapping[int, BatchSequence], with_logprobs: bool, verbose: bool) -> BatchStats:
    """Run until all sequences have ended. `verbose` prints the progress, and mlx-lm's statistics at the end."""
    ended = 0
    with generator.stats() as stats:
        while ended < len(sequences):
            for response in generator.next_generated():
                sequences[response.uid].add(response, with_logprobs)
                ended += response.finish_reason is not None
            if verbose:
                print(f"{ended} of {len(sequences)} sequences finished", end="\r", flush=True)
    if verbose:
        print(f"\nPrompts: {stats.prompt_tokens} tokens, {stats.prompt_tps:.1f} per second")
        print(f"Outputs: {stats.generation_tokens} tokens, {stats.generation_tps:.1f} per second")
        print(f"Peak memory: {stats.peak_memory:.2f} GB")
    return stats


def per_sequence(processors: Sequence[Any] | None, sequences: int) -> Sequence[Any] | None:
    """Return the logits processors of each sequence. A list of only functions is shared by all sequences."""
    if not processors:
        return None
    if all(callable(each) for each in processors):
        return [list(processors)] * sequences
    return [[each] if callable(each) else each for each in processors]


@dataclass
class RunSpeed:
    """Token counts and times of one or more runs, summed. Times of prefill and decoding follow from mlx-lm's rates.

    first: seconds from the calls to the first tokens. whole: seconds from the calls to the last tokens.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    runs: int = 0
    first: float = 0.0
    whole: float = 0.0

    def add(self, run: "Responses") -> None:
        """Add a run, also an incomplete one."""
        last = run.last
        if last is not None:
            self.runs += 1
            self.first += run.times[0] - run.started
            self.whole += run.times[1] - run.started
            self.prompt_tokens += last.prompt_tokens
            self.prompt_seconds += last.prompt_tokens / last.prompt_tps if last.prompt_tps else 0.0
            self.tokens += last.generation_tokens
            self.seconds += last.generation_tokens / last.generation_tps

    def summary(self) -> dict[str, Any]:
        """Return the fields of a summary."""
        return {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0,
            "seconds_to_first_token": self.first / self.runs if self.runs else 0.0,
            "seconds": self.whole,
        }


@dataclass(frozen=True)
class Spent:
    """What a gearbox has counted over all runs: seconds of shifts, and bytes that its layers read from the disk."""

    shift_seconds: float = 0.0
    disk_bytes: int = 0

    @classmethod
    def of(cls, gearbox: Gearbox | Observer | None) -> "Spent":
        if gearbox is None:
            return cls()
        stream = getattr(gearbox, "residency", None)
        return cls(gearbox.shift_seconds, stream.reader.bytes_read if isinstance(stream, Stream) else 0)


@dataclass(eq=False)
class Responses(Iterator[GearResponse]):
    """Responses of a sequence, and the summary of the run so far.

    No other sequence uses the gearbox while a response is computed; between responses it is free.

    Args:
        responses: of `model` in a mode.
        gearbox: None for a pair, whose large model is `model`.
        draft_model: the second model that drafts; None without.
        started: time of the call, in seconds of `time.perf_counter`.
    """

    responses: Iterator[GearResponse] = field(repr=False)
    model: nn.Module = field(repr=False)
    mode: Mode
    gearbox: Gearbox | Observer | None = field(repr=False)
    controller: Governor | MemoryGuard | None = None
    draft_model: nn.Module | None = field(default=None, repr=False)
    started: float = field(default_factory=time.perf_counter, repr=False)
    last: GearResponse | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._lock = lock_of(self.gearbox)
        self._before = Spent.of(self.gearbox)
        self.times = (0.0, 0.0)
        """Times of the first token and of the latest one, in seconds of `time.perf_counter`."""
        self.tally = Tally.of(NAMES if self.gearbox is None else [gear.name for gear in self.gearbox.ladder])

    def __next__(self) -> GearResponse:
        with self._lock:
            response = next(self.responses)
        now = time.perf_counter()
        self.times = (self.times[0] if self.last else now), now
        self.last = response
        self.tally.add(self.last)
        return self.last

    def close(self) -> None:
        """End the sequence."""
        if hasattr(self.responses, "close"):
            with self._lock:
                self.responses.close()

    def since(self, entered: float) -> dict[str, float]:
        """Return the times of a whole command; entered: its start, in seconds of `time.perf_counter`."""
        return whole_command(entered, self.started, *self.times)

    def summary(self, model: str | None = None, second_model: str | None = None) -> dict[str, Any]:
        """Return the run so far: tokens, gears, bytes of weights, drafts, speed, memory; the object of `--summary`.

        Args:
            model: its name; None: its type in mlx-lm.
            second_model: the name of the small model or of the draft model.
        """
        name, speed = model or type_of(self.model), RunSpeed()
        speed.add(self)
        if isinstance(self.mode, Pair):
            return summary_of_pair(name, second_model, self.model, self.mode, self.tally, speed)
        assert self.gearbox is not None
        result = summary_of(name, self.gearbox, self.mode, self.tally, speed, self.controller, self._before)
        if self.draft_model is not None:  # it has one pass per drafted token
            passes = self.tally.drafted
            read = {"passes": passes, "weight_bytes": passes * bytes_read(self.draft_model)}
            result["draft_model"] = {"name": second_model or type_of(self.draft_model), **read}
        return result


def type_of(model: nn.Module) -> str:
    """Return a model's type, such as "llama"."""
    return str(getattr(model, "model_type", type(model).__name__))


def summary_of(
    name: str,
    gearbox: Gearbox | Observer,
    mode: Mode,
    tally: Tally,
    speed: RunSpeed,
    controller: Governor | MemoryGuard | None = None,
    before: Spent = Spent(),
) -> dict[str, Any]:
    """Return the summary of the run since `before`. A Governor lowers bits of gears, so there are effective bits."""
    spent = Spent.of(gearbox)
    further: dict[str, Any] = {}
    if isinstance(controller, Governor):
        further = {"effective_bits_per_weight": tally.mean(controller.bits_read), "controller": controller.summary()}
    stream = getattr(gearbox, "residency", None)
    if isinstance(stream, Stream):
        further["streaming"] = stream.summary(spent.disk_bytes - before.disk_bytes, tally.tokens)
    further |= kv_summary(tally, len(gearbox.model.layers)) | measured_seconds(gearbox)
    return summarize(
        tally,
        model=name,
        mode=mode.name,
        of_mode=mode.summary(tally),
        ladder=gearbox.ladder_report(),
        bits_per_weight={gear.name: gearbox.bits_per_weight(gear) for gear in gearbox.ladder},
        weight_bytes={gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder},
        original_bytes=gearbox.original_bytes_per_token(),
        **speed.summary(),
        shift_seconds=spent.shift_seconds - before.shift_seconds,
        making_seconds=gearbox.making_seconds,
        peak_memory_bytes=mx.get_peak_memory() + mapped_bytes(),
        active_memory_bytes=gearbox.active_memory,
        managed_layers=len(gearbox.layers),
        unmanaged_layers=len(gearbox.unmanaged),
        unmanaged_reasons=dict(Counter(gearbox.unmanaged.values())),
        compute_dtype=dtype_name(gearbox.compute_dtype),
        storage_dtype=dtype_name(gearbox.storage[""]),
        **further,
    )


def parameters_of(models: tuple[nn.Module, nn.Module]) -> tuple[int, int]:
    """Return the numbers of parameters; quantized weights count as original ones."""
    # mlx-lm counts leaf modules. A gearbox replaces the model's method for them, so the class's method is used.
    leaves = (SimpleNamespace(leaf_modules=partial(type(model).leaf_modules, model)) for model in models)
    small, large = (int(get_total_parameters(each)) for each in leaves)
    return small, large


def summary_of_pair(
    name: str, small_name: str | None, large: nn.Module, mode: Pair, tally: Tally, speed: RunSpeed
) -> dict[str, Any]:
    """Return the summary of one run of a pair."""
    models = mode.small_model, large
    counts = parameters_of(models)
    read, parameters = dict(zip(NAMES, map(bytes_read, models))), dict(zip(NAMES, counts))
    bits = {each: 8 * read[each] / parameters[each] for each in NAMES}
    return summarize(
        tally,
        model=name,
        small_model=small_name or type_of(mode.small_model),
        mode=mode.name,
        ladder=[{"name": each, "bits": bits[each], "bytes_per_weight": bits[each] / 8} for each in NAMES],
        bits_per_weight=bits,
        weight_bytes=read,
        of_mode=mode.summary(tally),
        parameters=parameters,
        parameter_ratio=parameter_ratio(tally.mean(tally.gear_tokens["large"]), counts),
        threshold_bits=mode.threshold_with(large),
        window=mode.window,
        min_gear_duration=mode.min_gear_duration,
        **speed.summary(),
        peak_memory_bytes=mx.get_peak_memory() + mapped_bytes(),
        compute_dtype=dtype_name(model_dtype(large)),
        storage_dtype=dtype_name(stored_dtype(large)),
    )
