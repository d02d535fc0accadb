"""EAD's Table 1 along a text: two models that take turns, for a sweep of thresholds, against chance at the same share.

Along a given text neither model sees what the other one would have written, so that their predictions do not depend on
the gate. Each model reads the text once, and the gate is replayed over the recorded entropies for every threshold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..routing.monitor import Monitor
from ..routing.pair import LARGE, SMALL, first_model, pair_gate, pair_monitor, parameter_ratio
from .chance import Chance, against_chance
from .metrics import by_bucket, entropy_of_logprobs, kl_divergence, log_softmax, quality
from .pair_scores import table_1
from .replay import Recording, load_shaped
from .session import EvaluationSession
from .tables import Columns, change_of_kl, kilobytes, markdown_table, percent, three_digits


@dataclass(frozen=True)
class PairRecording:
    """The predictions of both models for the same n tokens.

    small, large: recordings against the large model, whose KL from itself is 0. top_probability: (n,), of the large
    model. vocab_size: V, the same for both.
    """

    small: Recording
    large: Recording
    top_probability: np.ndarray
    vocab_size: int

    def save(self, file: Any) -> None:
        both: dict[str, Any] = {
            name: np.stack([array, getattr(self.large, name)]) for name, array in vars(self.small).items()
        }
        np.savez(file, top_probability=self.top_probability, **both)

    @classmethod
    def load(cls, file: Path, tokens: int, vocab_size: int) -> "PairRecording":
        """The recording in a file, with this number of predictions. Raises GearbxError if it is damaged."""
        of_both = {name: (2, *shape) for name, shape in Recording.shapes(tokens, 2).items()}
        loaded = load_shaped(file, {"top_probability": (tokens,), **of_both})
        top_probability = loaded.pop("top_probability")
        small, large = (Recording(**{name: both[gear] for name, both in loaded.items()}) for gear in (SMALL, LARGE))
        return cls(small, large, top_probability, vocab_size)


def logprobs_along(model: nn.Module, window: Sequence[int], vocab_size: int) -> np.ndarray:
    """Log-probabilities (n - 1, V), float64, of the token after each of a window's n tokens but the last."""
    logits = model(mx.array([list(window[:-1])]))[0, :, :vocab_size]
    return log_softmax(np.array(logits.astype(mx.float32)))


def record_pair(
    small: nn.Module,
    large: nn.Module,
    windows: Iterable[tuple[Sequence[int], int]],
    vocab_size: int,
    session: EvaluationSession | None = None,
) -> PairRecording:
    """Let both models read every window from its beginning.

    Args:
        windows: tokens, and how many of them are the prompt, in which predictions do not count.
        session: keeps the recording of each window as soon as it is made.
    """
    parts = []
    for number, (window, prompt) in enumerate(windows):
        start = max(prompt - 1, 0)
        record = partial(record_window, small, large, window, start, number, vocab_size)
        load = partial(PairRecording.load, tokens=len(window) - 1 - start, vocab_size=vocab_size)
        parts.append(record() if session is None else session.recording(f"window-{number}", record, load))
    return joined(parts)


def record_window(
    small: nn.Module, large: nn.Module, window: Sequence[int], start: int, number: int, vocab_size: int
) -> PairRecording:
    """Both models along a window, from its token `start` on."""
    p, q = (logprobs_along(model, window, vocab_size)[start:] for model in (large, small))
    targets = np.array(window[start + 1 :])
    by_small, by_large = compared(p, q, number, targets, SMALL), compared(p, p, number, targets, LARGE)
    return PairRecording(by_small, by_large, np.exp(p.max(axis=-1)), vocab_size)


def joined(parts: Sequence[PairRecording]) -> PairRecording:
    """The recordings of windows as one."""
    small, large = (
        Recording(*(np.concatenate(column) for column in zip(*(vars(run).values() for run in runs))))
        for runs in ([part.small for part in parts], [part.large for part in parts])
    )
    return PairRecording(small, large, np.concatenate([part.top_probability for part in parts]), parts[0].vocab_size)


def compared(p: np.ndarray, q: np.ndarray, window: int, targets: np.ndarray, gear: int) -> Recording:
    """The recording of one window: q against the large model's p, both (n, V)."""
    n = len(targets)
    passes = np.zeros((n, 2), int)
    passes[:, gear] = 1
    return Recording(
        np.full(n, window),
        -q[np.arange(n), targets],
        kl_divergence(p, q),
        kl_divergence(q, p),
        p.argmax(axis=-1) == q.argmax(axis=-1),
        entropy_of_logprobs(q),
        np.full(n, gear),
        passes,
    )


def turns(recording: PairRecording, threshold: float, window: int, min_duration: int) -> np.ndarray:
    """Which model computes each token (n,). The gate sees the entropies of the engaged one, as in generation."""
    entropies = (recording.small.entropy, recording.large.entropy)
    monitor = pair_monitor(recording.vocab_size, window)
    gears: list[int] = []
    for text in np.unique(recording.small.window):
        gears += turns_along(
            monitor, entropies, np.flatnonzero(recording.small.window == text), threshold, min_duration
        )
    return np.array(gears)


def turns_along(
    monitor: Monitor, entropies: tuple[np.ndarray, ...], places: np.ndarray, threshold: float, min_duration: int
) -> Iterator[int]:
    """The same for one text, from its first token on."""
    monitor.reset()
    gate, engaged = pair_gate(threshold, min_duration), first_model(threshold)
    gate.reset(engaged)
    for place in places:
        yield engaged
        engaged = gate.update(monitor.update(float(entropies[engaged][place])))


def mixed(recording: PairRecording, gears: np.ndarray) -> Recording:
    """The recording of the two models in turns: each token from the model that computes it; gears (n,)."""
    chosen = {}
    for name, small in vars(recording.small).items():
        large = getattr(recording.large, name)
        chosen[name] = np.where(gears.reshape(-1, *(1,) * (small.ndim - 1)) == LARGE, large, small)
    return Recording(**chosen)


class Blend(Chance):
    """A random choice between both models along a text: for every share, its expectation is their weighted mean."""

    def __init__(self, recording: PairRecording):
        super().__init__([recording.small, recording.large], [0.0, 1.0])

    def at(self, place: float | np.ndarray, name: str) -> np.ndarray:
        """A field of the recordings (n,), for the large model's share: one for all tokens, or one for each (n,)."""
        small, large = (getattr(run, name).astype(float) for run in self.runs)
        return (1 - place) * small + place * large


def share_by_position(gears: np.ndarray, window: np.ndarray) -> np.ndarray:
    """The large model's share at the position of each token in its window, over all windows; (n,) of (n,) and (n,)."""
    position = np.concatenate([np.arange(count) for count in np.bincount(window)])
    return (np.bincount(position, gears == LARGE) / np.bincount(position))[position]


def sweep(
    recording: PairRecording,
    thresholds: Iterable[float],
    window: int,
    min_duration: int,
    parameters: tuple[int, int],
    weight_bytes: tuple[int, int],
) -> list[dict[str, Any]]:
    """A row for each threshold (bits), as in EAD's Table 1, compared with random choices.

    One random choice has the same share; the other has the same share at each position, which makes it depend on how
    texts usually go, but not on this text.

    Args:
        window, min_duration: tokens.
        parameters, weight_bytes: of the small and the large model; bytes that one token reads.
    """
    chance, rows = Blend(recording), []
    for threshold in thresholds:
        gears = turns(recording, threshold, window, min_duration)
        run, share = mixed(recording, gears), float(np.mean(gears == LARGE))
        tokens = {name: getattr(run, name) for name in ("nll", "kl", "kl_reverse", "agree")}
        tokens["reference_nll"] = recording.large.nll
        control = against_chance(run, chance, share)
        control["perplexity"] = float(np.exp(chance.at(share, "nll").mean()))
        rows.append(
            {
                "policy": "pair",
                "name": f"pair-{threshold:g}",
                "threshold": threshold,
                "share_top": share,
                "switches": int(sum(np.diff(gears[run.window == text]).astype(bool).sum() for text in set(run.window))),
                "parameter_ratio": parameter_ratio(share, parameters),
                "weight_bytes_per_token": float((run.passes @ np.array(weight_bytes)).mean()),
                **quality(**tokens),
                "buckets": by_bucket(recording.top_probability, tokens),
                "against_random_same_share": control,
                "against_random_same_positions": against_chance(run, chance, share_by_position(gears, run.window)),
            }
        )
    return rows


COLUMNS: Columns = {
    "threshold": lambda row: f"{row['threshold']:g}",
    "large": lambda row: percent(row["share_top"]),
    "parameters": lambda row: percent(row["parameter_ratio"]),
    "kB/token": kilobytes,
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "by chance": lambda row: f"{row['against_random_same_share']['perplexity']:.3f}",
    "agreement": lambda row: f"{row['top1_agreement']:.4f}",
    "chance": lambda row: f"{row['against_random_same_share']['top1_agreement']:.4f}",
    "KL mean": lambda row: three_digits(row["kl_mean"]),
    "vs chance": lambda row: change_of_kl(row["against_random_same_share"]),
    "by position": lambda row: change_of_kl(row["against_random_same_positions"]),
}
FIRST = ("threshold", "large", "kB/token", "perplexity", "agreement", "KL mean", "vs chance", "by position")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    part = " (the answers alone)" if report["answers_only"] else ""
    lines = [
        f"# {report['small_model']} and {report['model']} on {report['data']}",
        "",
        f"{report['tokens']} predictions in {report['windows']} windows of at most {report['context']} tokens{part}, "
        f"against the large model. Entropy is averaged over {report['gate']['window']} tokens; each model computes at "
        f"least {report['gate']['min_duration']} tokens in a row. Thresholds in bits, KL in nats.",
        "",
        *markdown_table(COLUMNS, report["policies"]),
        "",
        "As in EAD's Table 1; the score is the share of tokens at which both prefer the same next token:",
        "",
        *table_1(report),
        "",
        "**large**: share of tokens that the large model computes. **parameters**: those used per token, over those of "
        "the large model. **by chance**, **chance**: a random choice between the models with the same share. "
        "**vs chance**: mean KL against that choice's, with its standard error; **by position**: against a random "
        "choice with the same share at each position in a text. Every token is one pass of one model, which also reads "
        "the tokens that the model missed.",
        "",
    ]
    return "\n".join(lines)
