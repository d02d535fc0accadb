"""Predictions of a model along text, in one gear or in a mode that shifts, and their distance from the top gear's.

The text is read with a real KV cache, and low gears leave their entries in it. The statistics are llama.cpp's:
perplexity and its ratio, mean, median and high quantiles of KL, top-1 agreement. KL is in nats, entropy in bits.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Struct

from ..decoding.mode import Mode, check_known
from ..decoding.response import GearResponse
from ..decoding.sampling import Choice, LogitsReader
from ..decoding.stream import stream_generate
from ..errors import GearbxError
from ..files.model_directory import context_length
from ..files.reading import json_lines, read_text
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox, costed_in
from ..gears.ladder import Gear, Ladder
from ..telemetry.agreement import Choices

GIVE_TEXT = "use UTF-8 text or JSON Lines"
PROMPT = "Question: {question}\nAnswer:"


class TextRow(Struct, frozen=True):
    """A line of JSON Lines."""

    text: str | None = None
    question: str | None = None
    answer: str | None = None


def read_documents(path: Path) -> list[str]:
    """Return the documents of a file: plain text is one; JSON Lines have `text`, or `question` and `answer` (GSM8K).

    Raises:
        GearbxError: a file that cannot be read, is empty, or has a line without these fields.
    """
    if path.suffix in (".jsonl", ".json"):
        return [row["text"] if "text" in row else f"{PROMPT.format(**row)} {row['answer']}" for row in read_rows(path)]
    text = read_text(path, "text", GIVE_TEXT)
    if not text.strip():
        raise GearbxError(f"{path}: must not be empty; use a text, or JSON Lines as in GSM8K")
    return [text]


def read_rows(path: Path, fields: tuple[str, ...] | None = None) -> list[dict[str, str]]:
    """Return the objects of a JSON Lines file with `text`, or `question` and `answer`, none of them empty.

    Raises:
        GearbxError: as read_documents; if given, each line must have `fields`.
    """
    choices = [fields] if fields else [("text",), ("question", "answer")]
    rows = []
    for number, row in json_lines(path, read_text(path, "text", GIVE_TEXT), TextRow, GIVE_TEXT):
        filled = {name for name in TextRow.__struct_fields__ if (getattr(row, name) or "").strip()}
        names = next((names for names in choices if filled.issuperset(names)), None)
        if names is None:
            shown = " or ".join(" and ".join(repr(name) for name in names) for names in choices)
            raise GearbxError(f"{path}, line {number}: must have text in {shown}; set this field")
        rows.append({name: getattr(row, name) for name in names})
    if not rows:
        raise GearbxError(f"{path}: must not be empty; use one JSON object per line, as in GSM8K")
    return rows


def windows_of(
    tokenizer: Any, documents: list[str], context: int, tokens: int, name: str, prompt: int = 0
) -> list[list[int]]:
    """Return windows of tokens, with `tokens` predictions in total, or as many as the text has.

    A single document is cut into consecutive windows; several documents are one window each, cut to the context. If the
    tokenizer adds a first token, every window has it.

    Args:
        context: the most tokens in a window.
        name: of the text, for the error.
        prompt: number of first tokens of each window that are read and not predicted.

    Raises:
        GearbxError: a single text shorter than a window, or no token to predict.
    """
    if context < 2:
        raise GearbxError(f"context: must be 2 tokens or more, got {context}; set a larger number")
    encoded = [encode(tokenizer, document) for document in documents]
    if len(encoded) == 1:
        if len(encoded[0]) < context:
            raise GearbxError(
                f"{name}: must have a window of {context} tokens, got {len(encoded[0])}; "
                f"use more text, or set --context {max(len(encoded[0]), 2)}"
            )
        encoded = stretches(encoded[0], context, beginning(tokenizer))
    windows, left = [], tokens
    for sequence in encoded:
        window = sequence[: min(context, prompt + left + 1)]
        if len(window) > prompt + 1:
            windows.append(window)
            left -= len(window) - prompt - 1
        if left <= 0:
            break
    if not windows:
        raise GearbxError(f"{name}: must have a document of {prompt + 2} tokens, got shorter ones; use more text")
    return windows


def context_for(context: int | None, config: dict, default: int = 256) -> int:
    """Return the tokens in a window: the given number, or the default.

    Raises:
        GearbxError: more than the model's context.
    """
    longest = context_length(config)
    if context is None:
        return min(default, longest or default)
    if longest and context > longest:
        raise GearbxError(f"--context: must be at most the model's {longest}, got {context}; set a smaller number")
    return context


def check_windows(windows: Iterable[Sequence[int]], model: nn.Module, name: str) -> None:
    """Validate that a model has all tokens of windows. Raises GearbxError if its tokenizer is not the model's."""
    check_known(name, [token for window in windows for token in window], vocabulary(model))


def encode(tokenizer: Any, document: str) -> list[int]:
    """Return the tokens of a document; it may exceed the model's context, since it will be cut."""
    return list(tokenizer.encode(document, verbose=False))


def beginning(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer adds before text."""
    token = getattr(tokenizer, "bos_token_id", None)
    return [token] if token is not None and encode(tokenizer, "a")[:1] == [token] else []


def stretches(tokens: list[int], context: int, prefix: list[int]) -> list[list[int]]:
    """Return tokens cut into windows of at most `context` tokens, each starting with the tokens of `prefix`."""
    body = tokens[len(prefix) :] if tokens[: len(prefix)] == prefix else tokens
    size = context - len(prefix)
    return [prefix + body[start : start + size] for start in range(0, len(body), size)]


PASS_TOKENS = 16  # tokens in a pass, the most that native kernels take


@dataclass(frozen=True)
class TextPrediction:
    """A prediction of one token.

    window: its number. target: the token of the text. logprobs: (V,), float32. gear: that computed them. passes: over
    the weights, in each gear of the ladder.
    """

    window: int
    target: int
    logprobs: np.ndarray
    gear: Gear
    passes: Sequence[int]


def read_at_once(
    gearbox: Gearbox, window: Sequence[int], gear: Gear, cache: Sequence[Any] = ()
) -> Iterator[TextPrediction]:
    """Predict a window in one gear, several tokens per pass: only the last bits differ from one token per pass.

    Args:
        cache: empty KV caches; without them, new ones.
    """
    passes = [int(each is gear) for each in gearbox.ladder]  # passes of a token that has its own
    gearbox.shift(gear)
    for target, logprobs in zip(window[1:], logprobs_along(gearbox.model, window, cache)):
        yield TextPrediction(0, target, logprobs, gear, passes)


def logprobs_along(model: nn.Module, window: Sequence[int], cache: Sequence[Any] = ()) -> Iterator[np.ndarray]:
    """Yield log-probabilities (V,), float32, after each token of a window but the last; cache: as `read_at_once`."""
    cache = cache or make_prompt_cache(model)
    for start in range(0, len(window) - 1, PASS_TOKENS):
        yield from next_logprobs(model, window[start : min(start + PASS_TOKENS, len(window) - 1)], cache)


def read_in_mode(gearbox: Gearbox, tokenizer: Any, mode: Mode, window: Sequence[int]) -> Iterator[TextPrediction]:
    """Predict a window in a mode that shifts, as the mode would generate it."""
    logits: deque[mx.array] = deque()

    def noted(tokens: mx.array, of_token: mx.array) -> mx.array:  # log-probabilities are rounded to the model's type
        logits.append(of_token)
        return of_token

    how: dict[str, Any] = {"mode": mode, "gearbox": gearbox, "logits_processors": [noted]}
    for response, target in zip(written_text(gearbox.model, tokenizer, window[:1], window[1:], **how), window[1:]):
        (logprobs,) = logprobs_of(logits.popleft()[None])
        yield TextPrediction(0, target, logprobs, gearbox.ladder.find(response.gear), response.passes)


def written_text(
    model: nn.Module, tokenizer: Any, before: Sequence[int], text: Sequence[int], **how: Any
) -> Iterator[GearResponse]:
    """Generate given tokens in a mode as if it had chosen them: each gear acts on single tokens.

    Args:
        before: tokens before the text, one or more.
        how: keywords of `stream_generate`.
    """
    endless, coming = copy(tokenizer), iter(text)
    endless.eos_token_ids = set()  # end-of-sequence tokens do not end the text
    return stream_generate(
        model, endless, list(before), len(text), sampler=lambda logprobs: mx.array([next(coming, 0)]), **how
    )


def next_logprobs(model: Any, tokens: Sequence[int], cache: Any) -> np.ndarray:
    """Return log-probabilities (len(tokens), V), float32, from one pass over the weights."""
    return logprobs_of(model(mx.array([list(tokens)]), cache=cache))


def logprobs_of(logits: mx.array) -> np.ndarray:
    """Return log-probabilities (N, V), float32, of logits (1, N, V)."""
    return log_softmax(np.array(logits[0].astype(mx.float32))).astype(np.float32)


def choices_along(model: nn.Module, windows: Iterable[Sequence[int]], reader: LogitsReader) -> Choices:
    """Return the model's greedy choices after each token of windows but the last of each."""
    rows = []
    for window in windows:
        cache = make_prompt_cache(model)
        for start in range(0, len(window) - 1, PASS_TOKENS):
            part = window[start : min(start + PASS_TOKENS, len(window) - 1)]
            rows.append(np.array(reader.choices(model(mx.array([list(part)]), cache=cache)[0])))
    token, entropy, best, next_best = np.concatenate(rows).astype(np.float64).T[: Choice.MAGNITUDE]
    return Choices(token.astype(np.int64), entropy, best - next_best, np.exp(best))


@dataclass(frozen=True)
class Recording:
    """Results of n predictions; arrays of shape (n,), but `passes` (n, gears).

    nll: of the text's token, nats. kl: of the reference from these predictions, kl_reverse: back, nats. agree: whether
    both have the same most probable token. entropy: bits. gear: index in the ladder. passes: over the weights, in each
    gear.
    """

    window: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    kl_reverse: np.ndarray
    agree: np.ndarray
    entropy: np.ndarray
    gear: np.ndarray
    passes: np.ndarray


def recording_of(predictions: Iterable[TextPrediction], reference: Sequence[np.ndarray]) -> Recording:
    """Compare predictions with the reference's log-probabilities, (V,) for each."""
    rows = []
    for place, each in enumerate(predictions):
        p, q = log_softmax(reference[place]), log_softmax(each.logprobs)
        rows.append(
            (
                each.window,
                -q[each.target],
                kl_divergence(p, q),
                kl_divergence(q, p),
                p.argmax() == q.argmax(),
                entropy_of_logprobs(q),
                each.gear.index,
                each.passes,
            )
        )
    return Recording(*(np.array(column) for column in zip(*rows)))


Read = Callable[[Sequence[int]], Iterable[TextPrediction]]
"""Function from a window to its predictions."""


def compared(gearbox: Gearbox, window: Sequence[int], readers: Iterable[Read], uncounted: int = 0) -> list[Recording]:
    """Compare each reader's predictions in a window with the top gear's, without the first `uncounted` ones."""
    top = read_at_once(gearbox, window, gearbox.ladder.top)
    reference = [each.logprobs for each in itertools.islice(top, uncounted, None)]
    return [recording_of(itertools.islice(read(window), uncounted, None), reference) for read in readers]


def joined_recordings(parts: Sequence[Recording]) -> Recording:
    """Return the recordings of windows as one."""
    return Recording(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Recording)))


def read_per_token(gearbox: Gearbox, used: Sequence[Gear], recording: Recording) -> tuple[float, float]:
    """Return the reads per token of a recording: bytes of weights, and bits per weight of the managed layers.

    Each pass costs as much as in a ladder of only the used gears: a model in one gear need not be stored in planes that
    several gears share. A token that is computed twice reads twice.
    """
    ladder = Ladder([gear.bits for gear in used])
    alone = costed_in(gearbox, ladder)
    costs = {gear.bits: (alone.weight_bytes_per_token(gear), alone.bits_per_weight(gear)) for gear in ladder}
    of_gears = np.array([costs.get(gear.bits, (0, 0)) for gear in gearbox.ladder]).T
    weight_bytes, bits = (float((recording.passes @ each).mean()) for each in of_gears)
    return weight_bytes, bits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities over the last axis, float64."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def kl_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return KL(p || q) = sum p (log p - log q) in nats, from log-probabilities of shape (..., V); at least 0."""
    possible = np.isfinite(p)  # tokens of probability 0 add 0
    difference = np.subtract(p, q, out=np.zeros(np.broadcast_shapes(p.shape, q.shape)), where=possible)
    return np.maximum((np.exp(p) * difference).sum(axis=-1), 0.0)


def entropy_of_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """Return H = -sum p log2 p in bits over the last axis, float64, from log-probabilities of shape (..., V).

    `decoding.sampling.entropy_bits` computes it with MLX, also from logits.
    """
    finite = np.where(np.isfinite(logprobs), logprobs, 0.0)
    return np.maximum(-(np.exp(logprobs) * finite).sum(axis=-1) / math.log(2), 0.0)


def quality(
    nll: np.ndarray, kl: np.ndarray, kl_reverse: np.ndarray, agree: np.ndarray, reference_nll: np.ndarray
) -> dict[str, float]:
    """Return the statistics of a policy over n tokens; {} for none. Every argument has shape (n,).

    Args:
        nll, reference_nll: negative log-likelihoods (nats) under the policy and under the reference.
        kl, kl_reverse: KL of the reference from the policy, and back (nats).
        agree: whether both have the same most probable token.
    """
    if not len(nll):
        return {}
    ratio = float(np.exp((nll - reference_nll).mean()))
    return {
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": ratio * error_of_mean(nll - reference_nll),
        **spread("kl", kl),
        **spread("kl_reverse", kl_reverse),
        "kl_mean_error": error_of_mean(kl),
        "top1_agreement": float(agree.mean()),
        "top1_agreement_error": error_of_mean(agree),
    }


def error_of_mean(values: np.ndarray) -> float:
    """Return the standard error of a mean over tokens (n,); NaN for one token."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Return mean, median, 90th, 99th and 99.9th percentile, and maximum."""
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    found = {"mean": values.mean(), **{of: np.quantile(values, share) for of, share in shares.items()}}
    return {f"{name}_{of}": float(value) for of, value in {**found, "max": values.max()}.items()}


def three_digits(value: float) -> str:
    """Return three significant digits; "0" for values below the resolution of float32."""
    return "0" if value < 1e-9 else f"{value:.3g}"
