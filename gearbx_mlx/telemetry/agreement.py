"""Share of tokens that a quantized checkpoint and its original both choose, by entropy, margin and probability.

`analyze --reference` measures it. Without an original, `curves` has figures of other models with as many bits, written
by `python -m research agreement`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ..files.reading import Count, read_json
from .trace import BLUE, ORANGE, get_pyplot, save

ENTROPY, MARGIN, PROBABILITY = "entropy", "margin", "probability"
EDGES = {
    ENTROPY: (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0),  # bits
    MARGIN: (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),  # nats between the two best tokens
    PROBABILITY: (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
}
UNITS = {ENTROPY: "entropy, bits", MARGIN: "margin, nats", PROBABILITY: "probability of the checkpoint's token"}
UNSURE = 2.0  # bits of entropy, an edge: the sentence is about tokens above it
CURVES = Path(__file__).parent / "agreement.json"
AGREEMENT_PICTURE = "agreement.png"
CONFIDENCE = 1.959964  # standard deviations of a normal distribution, two-sided 95%


@dataclass(frozen=True)
class Choices:
    """Greedy choices along a text, arrays (n,): token, entropy (bits), margin (nats), probability of the token."""

    token: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray
    probability: np.ndarray


class Bin(Struct, frozen=True):
    """Tokens from `low` up to the next bin's. mean: of the binned quantity. same: tokens that the original chooses too.

    right: tokens that are the text's own.
    """

    low: float
    mean: float
    tokens: Count
    same: Count
    right: Count

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the share of `same`."""
        return wilson(self.same, self.tokens)


class TokenAgreement(Struct, frozen=True):
    """The choices of a checkpoint beside its original's on `tokens` tokens of a text; empty bins are omitted.

    bits: of the checkpoint's weights and of the original's; None: neither quantized to one width nor original.
    """

    model: str
    reference: str
    bits: tuple[int | None, int | None]
    data: str
    tokens: Count
    entropy: list[Bin]
    margin: list[Bin]
    probability: list[Bin]

    def different_above(self, bits: float) -> tuple[int, int]:
        """Return the tokens in bins of entropy from `bits` on that the original chooses differently, and all there."""
        above = [each for each in self.entropy if each.low >= bits]
        return sum(each.tokens - each.same for each in above), sum(each.tokens for each in above)

    def sentence(self) -> str:
        """Return the result in words."""
        (different, tokens), limit = self.different_above(UNSURE), UNSURE
        if not tokens:
            (different, tokens), limit = self.different_above(0), 0
        low, high = (100 * each for each in wilson(different, tokens))
        where = f"in tokens above {limit:g} bits" if limit else "in all tokens"
        share = f"{100 * different / tokens:.0f} of 100 ({low:.0f} to {high:.0f})"
        return f"{where}, {self.names} choose differently in {share}; {tokens} tokens of {Path(self.data).name}"

    @property
    def names(self) -> str:
        mine, theirs = self.bits
        if mine is None or theirs is None or mine == theirs:
            return "this checkpoint and the reference"
        return f"{mine}-bit and {theirs}-bit weights"

    def differing(self, entropies: Sequence[float]) -> float:
        """Return the expected share of tokens with these entropies (bits) that the original chooses differently."""
        lows = [each.low for each in self.entropy]
        places = np.clip(np.searchsorted(lows, entropies, side="right") - 1, 0, None)
        rates = np.array([1 - each.same / each.tokens for each in self.entropy])
        return float(rates[places].mean())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with the share and interval of every bin."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return fields | {name: [described(each) for each in fields[name]] for name in EDGES}


class Curves(Struct, frozen=True):
    """The content of CURVES."""

    schema: str
    version: int
    curves: list[TokenAgreement]


def described(one: Bin) -> dict[str, Any]:
    """Return a bin as JSON."""
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    return fields | {"share": one.same / one.tokens, "interval": list(one.interval)}


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a share by Wilson's score (1927); (0, 1) of no trials."""
    if not total:
        return 0.0, 1.0
    share, square = count / total, CONFIDENCE**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = CONFIDENCE * math.sqrt(share * (1 - share) / total + square / (4 * total**2)) / (1 + square / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def agreement_of(mine: Choices, theirs: np.ndarray, targets: np.ndarray, **about: Any) -> TokenAgreement:
    """Return how a checkpoint's choices agree with its original's.

    Args:
        theirs: the original's tokens (n,). targets: the text's (n,).
        about: the other fields of `TokenAgreement`.
    """
    same, right = mine.token == theirs, mine.token == targets
    bins: dict[str, Any]
    bins = {name: binned(getattr(mine, name), edges, same, right) for name, edges in EDGES.items()}
    return TokenAgreement(tokens=len(targets), **bins, **about)


def binned(values: np.ndarray, edges: Sequence[float], same: np.ndarray, right: np.ndarray) -> list[Bin]:
    """Return the bins of values (n,) that have tokens. edges: lower ones, ascending."""
    places = np.clip(np.digitize(values, edges) - 1, 0, None)
    found = []
    for place, low in enumerate(edges):
        inside = places == place
        if inside.any():
            counts = (int(each[inside].sum()) for each in (np.ones_like(same), same, right))
            found.append(Bin(low, float(values[inside].mean()), *counts))
    return found


@functools.cache
def curves() -> Sequence[TokenAgreement]:
    """Return the bundled figures of other models, in the order of the file."""
    return read_json(CURVES, Curves, "curves of agreement", "reinstall gearbx-mlx").curves


def borrowed(bits: int, entropies: Sequence[float]) -> dict[str, Any] | None:
    """Return estimates for tokens of these entropies from other models with as many bits; None without such a model.

    Returns:
        `models`, and for each the expected share of tokens that its original would choose differently.
    """
    found = [each for each in curves() if each.bits[0] == bits]
    if not found or not entropies:
        return None
    expected = [each.differing(entropies) for each in found]
    return {"measured_on": [each.model for each in found], "bits": bits, "expected_different": expected}


def borrowed_sentence(found: Mapping[str, Any]) -> str:
    """Return a result of `borrowed` in words."""
    shares = sorted({f"{100 * share:.0f}" for share in found["expected_different"]}, key=int)
    models = " and ".join(found["measured_on"])
    return (
        f"about {' to '.join(dict.fromkeys([shares[0], shares[-1]]))} of 100 tokens would differ from 16-bit weights, "
        f"if this model were like {models} at {found['bits']} bits; set --reference to measure"
    )


def draw_agreement(found: TokenAgreement, path: Path) -> None:
    """Draw the share of equal choices by entropy, by margin and by probability, the last as a reliability diagram."""
    figure, panels = get_pyplot().subplots(1, 3, figsize=(13, 4.2), layout="constrained", sharey=True)
    for axes, name in zip(panels, EDGES):
        bins = getattr(found, name)
        draw_bins(axes, bins, "same", BLUE, "o", "the original's token")
        if name == PROBABILITY:
            draw_bins(axes, bins, "right", ORANGE, "s", "the text's token")
            axes.plot([0, 1], [0, 100], color="0.6", linestyle="--", linewidth=1, zorder=0, label="as sure as right")
        else:
            axes.set_xscale("symlog", linthresh=EDGES[name][1])
            axes.set_xlim(0)
        axes.set(xlabel=UNITS[name], ylim=(0, 102))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens that the checkpoint chooses too, %")
    panels[-1].legend(frameon=False)
    figure.suptitle(f"{Path(found.model).name} beside {Path(found.reference).name}: {found.tokens} tokens")
    save(figure, path)


def draw_bins(axes: Any, bins: Sequence[Bin], field: str, color: str, marker: str, label: str) -> None:
    """Draw a marker per bin at its mean, with the 95% interval."""
    shares = [getattr(each, field) / each.tokens for each in bins]
    ends = [wilson(getattr(each, field), each.tokens) for each in bins]
    errors = [
        [100 * max(share - low, 0.0) for share, (low, _) in zip(shares, ends)],  # rounding may put an end inside
        [100 * max(high - share, 0.0) for share, (_, high) in zip(shares, ends)],
    ]
    style = {"color": color, "marker": marker, "linewidth": 1, "capsize": 3, "label": label}
    axes.errorbar([each.mean for each in bins], [100 * share for share in shares], errors, **style)
