"""The entries for programs: mlx-lm's stream_generate, generate and batch_generate, with gears.

And the summary of a run: what adds up over its responses, with what the gearbox and the mode know of it.
"""

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
import numpy as np
from mlx_lm.generate import BatchResponse, generate_step, speculative_generate_step
from mlx_lm.generate_utils import BatchStats
from mlx_lm.sample_utils import make_sampler
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
from .caches import cache_in_gears, check_kv_mode, check_quantizable
from .governor import Governor, MemoryGuard
from .learned import measured_seconds
from .mode import Mode, check_known, decode_lock, encoded, making, vocabulary_of
from .modes import check_draft_model, mode_class
from .pair import Pair, bytes_read
from .response import BatchGearResponse, GearResponse, Seen
from .sampling import Sampler, sampler_beside

NO_LOGPROBS = mx.zeros(0)
SHARED = {item.name for item in fields(Seen)} | {"token", "finish_reason", "from_draft"}


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
    """Generate text while the gearbox changes the precision of the weights.

    Several texts may be begun with one gearbox, in several threads as well: they take turns, and each keeps its gears.

    Args:
        model, tokenizer, prompt, max_tokens: as in `mlx_lm.stream_generate`, as are all further keywords.
        mode: how gears become tokens, such as `Lossless(draft=4)`: Route, Kickdown, Lossless, Pair, Static or
            TelemetryOnly, or its name for the default settings. Without one Lossless; TelemetryOnly for an
            Observer, Static for a ladder of 16 alone without a draft_model, Route with a controller that caps.
        gearbox: without one, the model's, else a new one with the default ladder; for a quantized model, an Observer.
        controller: route and kickdown: a Governor, which caps the gears by speed and by the machine's state.
        kv_gears: bits of the KV cache's gears, such as "4,16" (docs/kv_gears.md), which a `prompt_cache` gets in place.
        kv_gear: bits of the one that all passes read; without it, it follows the gear of the weights.

    Returns:
        Responses, which yields a GearResponse for each token; its `summary()` is the run so far.

    Raises:
        GearbxError: arguments that do not fit together; unknown tokens; a gearbox of another device.
    """
    began = time.perf_counter()
    check_keywords(kwargs)
    if controller is not None and gearbox is None:
        gearbox = controller.gearbox
    drafted = kwargs.get("draft_model") is not None
    chosen = mode_or_default(model, gearbox, mode, controller is not None and controller.caps, drafted)
    check_draft_model(chosen.name, kwargs.get("draft_model"))
    with making:
        box = chosen.gearbox_for(model, gearbox)
    if box is not None and not isinstance(prompt, str):
        check_known("prompt", np.array(prompt, int).reshape(-1).tolist(), vocabulary_of(box))
    kwargs |= cache_keywords(chosen, model, box, kv_gears, kv_gear, kwargs)
    if controller is not None:
        chosen.check_controller(controller, box)
    keywords = {"gearbox": box, "controller": controller, "max_tokens": max_tokens, **kwargs}
    if box is None:
        return Responses(chosen.stream(model, tokenizer, prompt, **keywords), model, chosen, None, began=began)
    check_device(box.device)
    keywords["sampler"] = sampler_beside(box, kwargs.get("sampler"))
    with decode_lock(box):
        responses = chosen.stream(model, tokenizer, prompt, **keywords)
    return Responses(responses, model, chosen, box, controller, kwargs.get("draft_model"), began)


KEYWORDS = {*inspect.signature(generate_step).parameters, *inspect.signature(speculative_generate_step).parameters}


def check_keywords(given: Mapping[str, Any]) -> None:
    """Raises GearbxError for a keyword that mlx-lm does not have; those of sampling are make_sampler's."""
    for name in given.keys() - KEYWORDS:
        if name in inspect.signature(make_sampler).parameters:
            hint = f"use sampler=mlx_lm.sample_utils.make_sampler({name}={given[name]!r})"
        else:
            hint = choose(name, sorted({*KEYWORDS, *inspect.signature(stream_generate).parameters}))
        raise GearbxError(f"stream_generate has no keyword '{name}'; {hint}")


def generate(model: nn.Module, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    """Return the whole text at once; keywords as in stream_generate. `verbose` prints it as it comes, and mlx-lm's
    figures."""
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print()
    if verbose and response is None:
        print("No text generated for this prompt")
    elif verbose and response is not None:
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
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
    """Return the mode that is named; without a name lossless, or what an observer or a controller can have.

    The top gear writes by itself where it is to be mlx-lm bit for bit, and no draft model drafts.

    Args:
        governed: a controller caps the gears.
        draft_model: one drafts.

    Raises:
        GearbxError: a mode that does not exist.
    """
    if isinstance(mode, Mode):
        return mode
    if mode is None:
        box, saved = gearbox or attached(model), saved_gears(model)
        observed = isinstance(box, Observer) or (box is None and without_gears(model))
        ladder = box.ladder if box is not None else None if saved is None else saved.manifest.ladder
        alone = not draft_model and ladder is not None and ladder[0].dense
        if observed:
            mode = "telemetry-only"
        elif governed:
            mode = "route"
        else:
            mode = "static" if alone else "lossless"
    return mode_class(mode)()


def cache_keywords(
    mode: Mode,
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    bits: str | Sequence[int] | None,
    fixed: int | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the `prompt_cache` for mlx-lm where the KV cache has gears; nothing without.

    Raises:
        GearbxError: gears that do not go with the mode, the other keywords or the model; `kv_bits` for a model, or one
            beside it, whose cache cannot be quantized.
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
    """mlx-lm's response, and the trace of each text: a GearResponse for each token, without its distribution."""

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
    """Many texts at once, which join and leave at any step: mlx-lm's BatchGenerator, whose keywords `kwargs` are.

    Its `insert` takes `seeds=` as well; its `next` returns BatchGearResponses.

    Args:
        mode, gearbox: as in `stream_generate`.
        batch_policy: the gear of a step, by the gears that its sequences want: "highest", "most" (the most wanted one),
            "quantile:Q" (the lowest that is enough for a share Q of them), or a function of the gears' numbers.

    Raises:
        GearbxError: a mode that writes one text at a time, a policy that does not exist, a model whose KV caches cannot
            be shared.
    """
    policy = policy_named(batch_policy)
    chosen = mode_or_default(model, gearbox, mode)
    with making:
        box = chosen.gearbox_for(model, gearbox)
    if agreement_of(model).group is not None:  # nothing makes the batches of ranks alike
        raise GearbxError("ranks share this model, and they write one text at a time; use stream_generate for each")
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
    """Generate a text for each prompt; all of them share each pass over the weights.

    In one gear a text is the one that `stream_generate` makes of the prompt alone.

    Args:
        model, ..., return_logprobs: as in `mlx_lm.batch_generate`; a prompt may be a text too.
        samplers: one for each prompt; `sampler=` is that of all others.
        logits_processors: of all texts, or a list of them for each prompt.
        seeds: a text that has one is the text alone after `mx.random.seed(seed)`.
        kwargs: of `batch_generator`: mode, gearbox, batch_policy, sampler, and those of mlx-lm's BatchGenerator.

    Raises:
        GearbxError: no prompts, an empty one or one beyond the context; no room for a token; lists of unlike length.
    """
    if isinstance(prompts, str):
        raise GearbxError("prompts is one text; give a list of texts")
    if not len(prompts):
        raise GearbxError("prompts is empty; give one prompt or more")
    tokens = [np.array(encoded(tokenizer, prompt), int).reshape(-1).tolist() for prompt in prompts]
    most = list(max_tokens) if isinstance(max_tokens, Sequence) else [max_tokens] * len(tokens)
    own = {"samplers": samplers, "logits_processors": per_text(logits_processors, len(tokens)), "seeds": seeds}
    generator = batch_generator(model, tokenizer, **kwargs)
    try:
        uids = generator.insert(tokens, most, prompt_caches, **own)
        texts = {uid: WrittenText(tokenizer, prompt) for uid, prompt in zip(uids, tokens)}
        stats = write(generator, texts, return_logprobs, verbose)
    finally:
        generator.close()
    written = [texts[uid] for uid in uids]
    return GearedBatchResponse(
        [text.text for text in written],
        stats,
        [text.cache for text in written] if return_prompt_caches else None,
        [text.tokens for text in written] if return_token_ids else None,
        [text.logprobs for text in written] if return_logprobs else None,
        [text.trace for text in written],
    )


class WrittenText:
    """One text in the making: its tokens, and what was seen of them."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self.detokenizer, self.prompt_tokens = tokenizer.detokenizer, len(prompt)
        self.trace: list[GearResponse] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.cache: list[Any] | None = None

    def add(self, response: BatchGearResponse, with_logprob: bool) -> None:
        """Raises what ended the sequence without a token to believe."""
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
    """Return the response for a token of a batch as `stream_generate` would give it, without its distribution and
    speeds."""
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


def write(generator: Any, texts: Mapping[int, WrittenText], with_logprobs: bool, verbose: bool) -> BatchStats:
    """Run until all texts have ended. `verbose` prints how far they are, and mlx-lm's figures at the end."""
    ended = 0
    with generator.stats() as stats:
        while ended < len(texts):
            for response in generator.next_generated():
                texts[response.uid].add(response, with_logprobs)
                ended += response.finish_reason is not None
            if verbose:
                print(f"{ended} of {len(texts)} texts written", end="\r", flush=True)
    if verbose:
        print(f"\nPrompts: {stats.prompt_tokens} tokens, {stats.prompt_tps:.1f} per second")
        print(f"Texts: {stats.generation_tokens} tokens, {stats.generation_tps:.1f} per second")
        print(f"Peak memory: {stats.peak_memory:.2f} GB")
    return stats


def per_text(processors: Sequence[Any] | None, texts: int) -> Sequence[Any] | None:
    """Return a list of logits processors for each text, from one for all of them or from what is that already."""
    if not processors:
        return None
    if all(callable(each) for each in processors):
        return [list(processors)] * texts
    return [[each] if callable(each) else each for each in processors]


@dataclass
class RunSpeed:
    """mlx-lm's own figures, added up over runs: tokens and seconds of prompts and of generation. And a clock's.

    first: seconds from the calls to the first tokens. whole: from the calls to the last ones.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    runs: int = 0
    first: float = 0.0
    whole: float = 0.0

    def add(self, run: "Responses") -> None:
        """Take a run as far as it came."""
        last = run.last
        if last is not None:
            self.runs += 1
            self.first += run.times[0] - run.began
            self.whole += run.times[1] - run.began
            self.prompt_tokens += last.prompt_tokens
            self.prompt_seconds += last.prompt_tokens / last.prompt_tps
            self.tokens += last.generation_tokens
            self.seconds += last.generation_tokens / last.generation_tps

    def summary(self) -> dict[str, Any]:
        """Its fields of a summary."""
        return {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0,
            "seconds_to_first_token": self.first / self.runs if self.runs else 0.0,
            "seconds": self.whole,
        }


@dataclass(eq=False)
class Responses(Iterator[GearResponse]):
    """The responses of a text as they come, and the summary of the run so far.

    Each is computed while no other text uses the gearbox. Between two of them it is free.

    Args:
        responses: of `model` in a mode.
        gearbox: None for a pair, whose large model is `model`.
        draft_model: the one that drafts, if any.
        began: when the text was asked for, in seconds of `time.perf_counter`.
    """

    responses: Iterator[GearResponse] = field(repr=False)
    model: nn.Module = field(repr=False)
    mode: Mode
    gearbox: Gearbox | Observer | None = field(repr=False)
    controller: Governor | MemoryGuard | None = None
    draft_model: nn.Module | None = field(default=None, repr=False)
    began: float = field(default_factory=time.perf_counter, repr=False)
    last: GearResponse | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._turn = contextlib.nullcontext() if self.gearbox is None else decode_lock(self.gearbox)
        self.times = (0.0, 0.0)
        """When the first token came, and the latest one."""
        self.tally = Tally.of(NAMES if self.gearbox is None else [gear.name for gear in self.gearbox.ladder])

    def __next__(self) -> GearResponse:
        with self._turn:
            response = next(self.responses)
        now = time.perf_counter()
        self.times = (self.times[0] if self.last else now), now
        self.last = response
        self.tally.add(self.last)
        return self.last

    def close(self) -> None:
        """End the text."""
        if hasattr(self.responses, "close"):
            self.responses.close()

    def since(self, entered: float) -> dict[str, float]:
        """Return the seconds of a whole command; entered: when it began, in seconds of `time.perf_counter`."""
        return whole_command(entered, self.began, *self.times)

    def summary(self, model: str | None = None, beside: str | None = None) -> dict[str, Any]:
        """Return the run so far: tokens, gears, bytes of weights, drafts, speed, memory; the object of `--summary`.

        Args:
            model: its name; without one, the type of its class in mlx-lm.
            beside: the name of the small model or of the draft model.
        """
        name, speed = model or type_of(self.model), RunSpeed()
        speed.add(self)
        if isinstance(self.mode, Pair):
            return summary_of_pair(name, beside, self.model, self.mode, self.tally, speed)
        assert self.gearbox is not None
        result = summary_of(name, self.gearbox, self.mode, self.tally, speed, self.controller)
        if self.draft_model is not None:  # one pass for each token that it drafted
            passes = self.tally.drafted
            read = {"passes": passes, "weight_bytes": passes * bytes_read(self.draft_model)}
            result["draft_model"] = {"name": beside or type_of(self.draft_model), **read}
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
) -> dict[str, Any]:
    """Return the summary of one run. With a controller, gears had fewer bits at times than by name."""
    further: dict[str, Any] = {}
    if isinstance(controller, Governor):
        further = {"effective_bits_per_weight": tally.mean(controller.bits_read), "controller": controller.summary()}
    stream = getattr(gearbox, "residency", None)
    if isinstance(stream, Stream):
        further["streaming"] = stream.summary(tally.tokens)
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
        shift_seconds=gearbox.shift_seconds,
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
    """Return numbers of parameters; quantized ones count as the weights that they stand for."""
    # Past a gearbox, which keeps mlx-lm from saving what it could not load: here its leaf modules are counted alone.
    leaves = (SimpleNamespace(leaf_modules=partial(type(model).leaf_modules, model)) for model in models)
    small, large = (int(get_total_parameters(each)) for each in leaves)
    return small, large


def summary_of_pair(
    name: str, small_name: str | None, large: nn.Module, mode: Pair, tally: Tally, speed: RunSpeed
) -> dict[str, Any]:
    """Return the summary of one run of two models that took turns."""
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
