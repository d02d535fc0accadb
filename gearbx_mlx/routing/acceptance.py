"""How long a low gear drafts before the top gear verifies: the probability that both agree.

A drafted token is worth its pass only if the top gear chooses the same one. The low gear's entropy H says how likely
that is: a(H), which falls as H rises and is fitted to recorded passes. The product of a(H) over a draft is the
probability that the top gear accepts all of it. The draft ends when the product falls below a bound. A drafting file,
which `calibrate --mode lossless` writes, has the draft gear, its curve a(H), and the bound.

The margin of a token says more (`LearnedAgreement`): it is used where the costs of passes are measured, too.
"""

import bisect
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Any, Protocol

import numpy as np
from msgspec import Meta, Struct, to_builtins

from ..errors import GearbxError
from ..files.reading import Count, check_schema, parse_json, typed
from .lookup import RunningMean

MOST_DRAFTED = 15  # with the token before them 16 vectors, which native kernels take in one pass over the weights
MOST_ROWS = MOST_DRAFTED + 1
BINS = 20
BOUNDS = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.97, 0.99)
DEFAULT_BOUND = 0.5
Recorded = Sequence[tuple[Sequence[float], Sequence[bool]]]
"""Of each text the entropy of the low gear (bits) at each token, and whether it agrees with the top gear there."""
MARGINS = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # between the bins of a learned a(m)
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise((0.0, *MARGINS, 10.0))]
BIN_NAMES = [*(f"below {margin:g}" for margin in MARGINS), "beyond"]
KEPT_DRAFTED = 0.997  # of the weight of earlier drafted tokens in a bin, at each further one
FIRST_WEIGHT = 8.0  # drafted tokens that the guess counts for in a bin
LEAST_SHARE = 1e-6
USUAL_ERROR = NormalDist(0.0, 0.8)  # of the difference between two logits in a low gear; SmolLM2's of 4 bits has 0.65
TYPICAL_HALVING = 4.0  # bits of entropy that halve the agreement: not fitted, but near to what small models show


class DraftRule(Protocol):
    """Decides when a draft ends. The token at which it ends is verified too, since it is paid for."""

    def begin(self) -> None:
        """Start a new draft."""

    def goes_on(self, entropy: float) -> bool:
        """Whether to draft one more token, after a token whose distribution has this entropy (bits)."""


class FixedLength:
    """Drafts of always the same length. Raises GearbxError for a length that a verification cannot take."""

    def __init__(self, length: int):
        if not 1 <= length <= MOST_DRAFTED:
            raise GearbxError(f"draft length is {length}; give 1 to {MOST_DRAFTED} tokens")
        self.length = length
        self.begin()

    def begin(self) -> None:
        self.drafted = 0

    def goes_on(self, entropy: float) -> bool:
        self.drafted += 1
        return self.drafted < self.length


def longest_draft(rule: DraftRule) -> int:
    """How many tokens no draft of a rule exceeds."""
    return rule.length if isinstance(rule, FixedLength) else MOST_DRAFTED


class ProductRule:
    """Drafts that continue while the product of a(H) over them is at least `bound`.

    Args:
        agreement: the function a, from bits to a probability.
        bound: above 0 and below 1.

    Raises:
        GearbxError: a bound outside of this range.
    """

    def __init__(self, agreement: Callable[[float], float], bound: float):
        if not 0 < bound < 1:
            raise GearbxError(f"the bound on a draft's acceptance is {bound}; give a number between 0 and 1")
        self.agreement = agreement
        self.bound = bound
        self.begin()

    def begin(self) -> None:
        self.product = 1.0

    def goes_on(self, entropy: float) -> bool:
        self.product *= self.agreement(entropy)
        return self.product >= self.bound


def typical_agreement(entropy: float) -> float:
    """a(H) of an uncalibrated model: 2^(-H / 4). With a bound of 0.5, a draft ends at 4 bits in all."""
    return 2.0 ** -(entropy / TYPICAL_HALVING)


def default_rule() -> ProductRule:
    """The rule of an uncalibrated model."""
    return ProductRule(typical_agreement, DEFAULT_BOUND)


def pool_adjacent_violators(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-increasing sequence closest to `values` in weighted squares (isotonic regression)."""
    blocks: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values, weights):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            mean, weight, count = blocks.pop()
            before = blocks[-1]
            total = before[1] + weight
            blocks[-1] = [(before[0] * before[1] + mean * weight) / total, total, before[2] + count]
    return [mean for mean, _, count in blocks for _ in range(int(count))]


@dataclass(frozen=True)
class AcceptanceCurve:
    """a(H) as steps: `agreement[i]` up to `edges[i]` bits, and the last value beyond all edges.

    Raises:
        GearbxError: edges that do not ascend, values that rise or are not probabilities, numbers that do not match.
    """

    edges: tuple[float, ...]
    agreement: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.agreement) != len(self.edges) + 1:
            raise GearbxError(f"{len(self.edges)} edges need {len(self.edges) + 1} values of agreement")
        if not all(map(math.isfinite, self.edges)) or any(a >= b for a, b in itertools.pairwise(self.edges)):
            raise GearbxError("the edges of a curve must be finite and ascend")
        if not all(0 <= a <= 1 for a in self.agreement) or any(a < b for a, b in itertools.pairwise(self.agreement)):
            raise GearbxError("agreement must be between 0 and 1 and must not rise with entropy")

    def __call__(self, entropy: float) -> float:
        return self.agreement[bisect.bisect_left(self.edges, entropy)]


def fit_curve(entropies: Sequence[float], agrees: Sequence[bool], bins: int = BINS) -> AcceptanceCurve:
    """a(H) from recorded tokens: the shares of agreement in bins of equal count, made monotone.

    A share is (k + 1/2) / (n + 1), so that a bin in which all tokens agree does not count as certain.

    Args:
        entropies: bits, of the low gear.
        agrees: whether both gears would choose the same token.

    Raises:
        GearbxError: no tokens.
    """
    if not len(entropies):
        raise GearbxError("no tokens to fit a curve to; give prompts that the model answers")
    order = np.argsort(np.asarray(entropies), kind="stable")
    h, agreed = np.asarray(entropies, float)[order], np.asarray(agrees, float)[order]
    parts = [part for part in np.array_split(np.arange(len(h)), bins) if len(part)]
    shares = [(agreed[part].sum() + 0.5) / (len(part) + 1) for part in parts]
    smooth = pool_adjacent_violators(shares, [len(part) for part in parts])
    steps = [(float(h[part[-1]]), value) for part, value in zip(parts, smooth)]
    edges: list[float] = []
    values = [steps[0][1]]
    for (edge, before), (_, after) in itertools.pairwise(steps):
        if after < before and (not edges or edge > edges[-1]):
            edges.append(edge)
            values.append(after)
        elif after < before:  # equal entropies on both sides of an edge: take the lower value
            values[-1] = after
    return AcceptanceCurve(tuple(edges), tuple(map(float, values)))


class LearnedAgreement:
    """a(m) as steps, learned while texts are written, by the drafted tokens that the top gear accepts.

    The margin m is how much the logit of a drafted token could lose before another token is chosen: the difference from
    the next one, after the noise of a sampler. The low gear's logits are off by an error that is much the same for
    all tokens, and m says whether it may change the choice. So m says more than the entropy, and the same at every
    temperature. Before anything is known, the error is taken to be normal.

    The latest tokens weigh most, since texts differ. A token after one that was rejected says nothing: the draft had
    left the text.

    Args:
        kept: what `state` returned at an earlier start.
    """

    def __init__(self, kept: Mapping[str, float] | None = None):
        kept = kept or {}
        self._bins = [
            RunningMean(
                KEPT_DRAFTED, min(kept.get(f"share {name}", share), 1.0), kept.get(f"count {name}", FIRST_WEIGHT)
            )
            for name, share in zip(BIN_NAMES, map(usual_agreement, MIDDLES))
        ]
        self.drafted = 0
        """Tokens that were learned from, since the start."""
        self._update()

    def __call__(self, margin: float) -> float:
        return self._agreement[bisect.bisect_right(MARGINS, margin)]

    def add(self, margins: Sequence[float], accepted: int) -> None:
        """Take a draft: the margins of its tokens, the first `accepted` of which the top gear has chosen."""
        for place, margin in enumerate(margins[: accepted + 1]):
            self._bins[bisect.bisect_right(MARGINS, margin)].add(place < accepted)
            self.drafted += 1
        if margins:
            self._update()

    @property
    def state(self) -> dict[str, float]:
        """What another start may begin with: positive numbers."""
        shares = {f"share {name}": max(mean.value, LEAST_SHARE) for name, mean in zip(BIN_NAMES, self._bins)}
        return shares | {f"count {name}": mean.weight for name, mean in zip(BIN_NAMES, self._bins)}

    def _update(self) -> None:
        falling = [(mean.value, mean.weight) for mean in reversed(self._bins)]
        self._agreement = pool_adjacent_violators(*zip(*falling))[::-1]


def usual_agreement(margin: float) -> float:
    """a(m) before anything is learned: the probability that an error does not change the choice."""
    return USUAL_ERROR.cdf(margin)


def margin_worth(entropy: float) -> float:
    """The margin that says as much as an entropy (bits), where a sampler does not tell by how much its token won."""
    return USUAL_ERROR.inv_cdf(min(max(typical_agreement(entropy), 0.5), 1 - LEAST_SHARE))


@dataclass
class Drafting:
    """Counts of a replay: tokens written, drafted and accepted, and verifications."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    drafts: Counter[int] = field(default_factory=Counter)
    """Verifications by the tokens that were drafted for them."""

    def weight_bytes_per_token(self, draft_bytes: float, top_bytes: float) -> float:
        """Weight bytes per token, where a drafted token reads `draft_bytes` and a verification `top_bytes`."""
        return (self.drafted * draft_bytes + self.verifications * top_bytes) / self.tokens if self.tokens else 0.0


def replay_drafts(sequences: Recorded, rule: DraftRule, learned: LearnedAgreement | None = None) -> Drafting:
    """Replay a drafting rule on recorded tokens, without a model.

    After a disagreement the draft would contain other tokens. The replay takes the recorded entropies for theirs.

    Args:
        learned: the rule's a(m), if it learns from these drafts; the sequences then have margins in place of entropies.
    """
    total = Drafting()
    for entropies, agrees in sequences:
        place = 0
        while place < len(entropies):
            room = min(MOST_DRAFTED, len(entropies) - place - 1)
            rule.begin()
            drafted = 0
            while drafted < room:
                drafted += 1
                if not rule.goes_on(entropies[place + drafted - 1]):
                    break
            accepted = next((i for i in range(drafted) if not agrees[place + i]), drafted)
            if learned is not None:
                learned.add(entropies[place : place + drafted], accepted)
            total.drafted += drafted
            total.accepted += accepted
            total.verifications += 1
            total.drafts[drafted] += 1
            total.tokens += accepted + 1
            place += accepted + 1
    return total


def best_bound(
    sequences: Recorded, curve: AcceptanceCurve, draft_bytes: float, top_bytes: float
) -> tuple[float, float]:
    """The bound on the product of a(H) with which a token reads the fewest weight bytes, and these bytes."""
    return cheapest(sequences, {bound: ProductRule(curve, bound) for bound in BOUNDS}, draft_bytes, top_bytes)


def best_length(sequences: Recorded, draft_bytes: float, top_bytes: float) -> tuple[int, float]:
    """The fixed draft length with which a token reads the fewest weight bytes, and these bytes."""
    rules = {length: FixedLength(length) for length in range(1, MOST_DRAFTED + 1)}
    return cheapest(sequences, rules, draft_bytes, top_bytes)


def cheapest(
    sequences: Recorded, rules: Mapping[Any, DraftRule], draft_bytes: float, top_bytes: float
) -> tuple[Any, float]:
    """The setting whose rule reads the fewest weight bytes for a token, and these bytes."""
    read = {
        setting: replay_drafts(sequences, rule).weight_bytes_per_token(draft_bytes, top_bytes)
        for setting, rule in rules.items()
    }
    best = min(read, key=lambda setting: read[setting])
    return best, read[best]


@dataclass(frozen=True)
class Dial:
    """Which drafted tokens stay though the top gear chose others: by a tolerance, or by what the text may lose.

    All tokens of a text count as drafted. Where some are not, it loses less.

    Args:
        nats: the tolerance itself.
        agreement: the least share of tokens that are to be the top gear's first choice.
        regret: nats of log-probability that a token may give up on average.

    Raises:
        GearbxError: not exactly one of them, or a value that it cannot have.
    """

    nats: float | None = None
    agreement: float | None = None
    regret: float | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise GearbxError("give one of a tolerance, a target agreement or a target regret")
        for name, value in {"tolerance": self.nats, "target regret": self.regret}.items():
            if value is not None and not 0 <= value < math.inf:
                raise GearbxError(f"{name} is {value}; give nats, 0 or more")
        if self.agreement is not None and not 0 < self.agreement <= 1:
            raise GearbxError(f"target agreement is {self.agreement}; give a part of 1, such as 0.99")

    def tolerance(self, gaps: Sequence[float]) -> float:
        """The largest tolerance in nats that keeps to it on recorded tokens; 0 where none does.

        Args:
            gaps: of every token, by how many nats the draft is less likely than the top gear's choice.
        """
        if self.nats is not None:
            return self.nats
        unlike, counts = np.unique([gap for gap in gaps if gap > 0], return_counts=True)
        lost, most = np.cumsum(counts), 1 - (self.agreement or 0)
        if self.regret is not None:
            lost, most = np.cumsum(counts * unlike), self.regret
        fits = np.flatnonzero(lost <= most * len(gaps) + 1e-9)
        return float(unlike[fits[-1]]) if len(fits) else 0.0


SCHEMA, VERSION = "gearbx-mlx drafting", 1


Seconds = Annotated[float, Meta(gt=0)]


class DraftTimes(Struct, frozen=True):
    """What passes take on one machine, in seconds.

    machine: processor, cores, kernels, and how weights and activations are stored. context: tokens in the KV cache.
    alone: a token of the top gear in mlx-lm's own loop. draft: a drafted token. verification: passes of the top gear
    over 1, 2, ... 16 tokens. per_token: predicted from the calibration's tokens.
    """

    machine: str
    context: Count
    alone: Seconds
    draft: Seconds
    verification: Annotated[list[Seconds], Meta(min_length=MOST_ROWS, max_length=MOST_ROWS)]
    per_token: Seconds

    @property
    def times_faster(self) -> float:
        """Than the top gear alone, as predicted."""
        return self.alone / self.per_token


class DraftFile(Struct, frozen=True):
    """How a model drafts for its top gear: the content of a drafting file.

    gears: bits of the ladder that was calibrated, the last of which verifies; draft: bits of the gear that drafts.
    fingerprint: of the model's weights. edges (bits), agreement: of the AcceptanceCurve. bound: on its product.
    tokens: of the calibration; agreement_overall: the share on which both gears agree. weight_bytes_per_token:
    predicted from these tokens; weight_bytes_per_token_top: of the top gear alone; weight_bytes_per_token_original: of
    the original weights, where the top gear reads other bytes than these.
    best_fixed_length, fixed_weight_bytes_per_token: the best fixed length of drafts, and what it reads, to compare.
    times: what passes take, where that was measured. tolerance: nats within which drafted tokens stay; 0: lossless.
    """

    gears: list[Count]
    draft: Count
    bound: float
    edges: list[float]
    agreement: list[float]
    vocab_size: Count
    fingerprint: str
    model: str
    group_size: Count
    format: str
    tokens: Count
    agreement_overall: float
    weight_bytes_per_token: float
    weight_bytes_per_token_top: float
    best_fixed_length: Count
    fixed_weight_bytes_per_token: float
    weight_bytes_per_token_original: float | None = None
    times: DraftTimes | None = None
    tolerance: float = 0.0
    schema: str = SCHEMA
    version: int = VERSION

    def __post_init__(self) -> None:
        self.rule()
        if self.draft not in self.gears[:-1]:
            raise GearbxError(f"draft is {self.draft}, which is not a gear below the top of {self.gears}")

    @property
    def weight_bytes_per_token_of_original(self) -> float:
        """The top gear's bytes, unless it reads other bytes than the original weights have."""
        return self.weight_bytes_per_token_original or self.weight_bytes_per_token_top

    def text(self) -> str:
        return json.dumps(to_builtins(self), indent=2) + "\n"

    def rule(self) -> ProductRule:
        return ProductRule(AcceptanceCurve(tuple(self.edges), tuple(self.agreement)), self.bound)

    def check(self, gears: Sequence[int], vocab_size: int, fingerprint: str) -> None:
        """Raises GearbxError unless the file was made for this ladder, vocabulary and model."""
        if self.vocab_size != vocab_size:
            raise GearbxError(f"made for a vocabulary of {self.vocab_size}, this model has {vocab_size}")
        if self.fingerprint != fingerprint:
            raise GearbxError(f"made for another model ({self.model}), whose weights are not these")
        if list(self.gears) != list(gears):
            shown, mine = (",".join(map(str, bits)) for bits in (gears, self.gears))
            raise GearbxError(f"made for gears {mine}, not {shown}")


def parse_draft_file(text: str) -> DraftFile:
    """A drafting file from its text.

    Raises:
        GearbxError: not JSON, another schema or version, a field that is missing or of the wrong kind.
    """
    content = parse_json(text)
    check_schema(content, "a drafting file", SCHEMA, VERSION)
    return typed(content, DraftFile)
