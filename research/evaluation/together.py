"""Write texts side by side, each in the gears that it chooses for itself, greedily: what each would write alone.

The product's batches have one gear for a step. Here a step passes all texts through every gear that one of them is in,
and each text goes on with the token, the keys and the values of its own gear's pass. With native kernels of a CPU a
text has the same bits in any company.
"""

from collections import deque
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx.decoding.batches import SequenceState
from gearbx_mlx.decoding.sampling import Choice, reader_of
from gearbx_mlx.evaluation.predictions import PASS_TOKENS
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.routing.gates import RUN_AHEAD


class Shifting:
    """Choose the gears of a text as modes static and route do: a token's entropy acts two passes later."""

    def __init__(self, gearbox: Gearbox, text: SequenceState):
        self.gearbox, self.text = gearbox, text
        self.coming = deque([text.first] * RUN_AHEAD)

    def first(self) -> Gear:
        """Return the gear of the next pass."""
        return self.coming.popleft()

    def again(self, gear: Gear, entropy: float) -> Gear | None:
        """Return the gear that computes the token again, given its entropy (bits), or None."""
        return None

    def after(self, entropy: float) -> None:
        """Take the entropy (bits) of the token."""
        self.coming.append(self.gearbox.ladder[self.text.gate.update(self.text.monitor.update(entropy))])


class Climbing:
    """Choose the gears of a text as mode kickdown does: up from the lowest, while a token's entropy is too high.

    thresholds: bits, one for each step of the ladder.
    """

    def __init__(self, gearbox: Gearbox, thresholds: Sequence[float]):
        self.ladder, self.thresholds = gearbox.ladder, thresholds

    def first(self) -> Gear:
        return self.ladder[0]

    def again(self, gear: Gear, entropy: float) -> Gear | None:
        climbs = gear != self.ladder.top and entropy > self.thresholds[gear.index]
        return self.ladder[gear.index + 1] if climbs else None

    def after(self, entropy: float) -> None:
        pass


@dataclass
class Text:
    """A text in the making.

    passes: over the weights, in each gear of the ladder. entropies: of each token, bits, in each gear that computed it.
    """

    chooser: Shifting | Climbing
    passes: list[int]
    tokens: list[int] = field(default_factory=list)
    entropies: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """What a pass in one gear wrote into the KV caches: keys and values (texts, heads, width) of each layer."""

    keys: list[mx.array]
    values: list[mx.array]

    @classmethod
    def of(cls, batch: Sequence[Any]) -> "Pass":
        return cls(
            [part.keys[..., part._idx - 1, :] for part in batch], [part.values[..., part._idx - 1, :] for part in batch]
        )


def read_prompt(gearbox: Gearbox, tokens: Sequence[int], gear: Gear, begun: Sequence[Any] = ()) -> list[Any]:
    """Return the KV cache of tokens, read in a gear, as many at once as a pass has.

    Args:
        begun: the cache of what stands before them, which stays as it is.
    """
    cache = deepcopy(list(begun)) if begun else make_prompt_cache(gearbox.model)
    gearbox.shift(gear)
    for start in range(0, len(tokens), PASS_TOKENS):
        gearbox.model(mx.array([list(tokens[start : start + PASS_TOKENS])]), cache=cache)
        mx.eval([part.state for part in cache])
    return cache


def write_together(
    gearbox: Gearbox,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[list[Any]],
    choosers: Sequence[Shifting | Climbing],
    most: int,
    ends: Collection[int],
) -> list[Text]:
    """Write a text after each prompt.

    Args:
        caches: of the prompts but for their last tokens; they stay as they are.
        most: tokens of a text. ends: tokens that end one.
    """
    texts = [Text(chooser, [0] * len(gearbox.ladder)) for chooser in choosers]
    batch = [type(parts[0]).merge(parts) for parts in zip(*caches)]
    going, last = list(texts), [prompt[-1] for prompt in prompts]
    for _ in range(most):
        step(gearbox, batch, going, last)
        stays = [row for row, text in enumerate(going) if text.tokens[-1] not in ends]
        if not stays:
            break
        if len(stays) < len(going):
            going = [going[row] for row in stays]
            for part in batch:
                part.filter(mx.array(stays))
        last = [text.tokens[-1] for text in going]
    return texts


def step(gearbox: Gearbox, batch: Sequence[Any], texts: Sequence[Text], last: Sequence[int]) -> None:
    """Add a token to every text, each in its own gear."""
    wishes = [text.chooser.first() for text in texts]
    entropies: list[list[float]] = [[] for _ in texts]
    passes: list[Pass] = []
    settled = np.zeros(len(texts), int)  # by which pass
    for gear in gearbox.ladder:  # a text that climbs comes to a later one
        rows = [row for row, wish in enumerate(wishes) if wish == gear]
        if not rows:
            continue
        for part in batch if passes else ():
            part.trim(1)
        gearbox.shift(gear)
        choices = reader_of(gearbox).choices(gearbox.model(mx.array([*last])[:, None], cache=batch)[:, -1])
        passes.append(Pass.of(batch))
        mx.eval(choices, passes[-1].keys, passes[-1].values)
        found = np.array(choices)
        for row in rows:
            text = texts[row]
            text.passes[gear.index] += 1
            entropies[row].append(float(found[row, Choice.ENTROPY]))
            higher = text.chooser.again(gear, entropies[row][-1])
            if higher is None:
                settled[row] = len(passes) - 1
                text.tokens.append(int(found[row, Choice.TOKEN]))
                text.entropies.append(entropies[row])
                text.chooser.after(entropies[row][-1])
            else:
                wishes[row] = higher
    if len(passes) > 1:
        put_back(batch, passes, mx.array(settled))


def put_back(batch: Sequence[Any], passes: Sequence[Pass], settled: mx.array) -> None:
    """Give each text the keys and values of the pass that settled its token (texts,)."""
    rows = mx.arange(settled.size)
    for layer, part in enumerate(batch):
        part.keys[..., part._idx - 1, :] = mx.stack([each.keys[layer] for each in passes])[settled, rows]
        part.values[..., part._idx - 1, :] = mx.stack([each.values[layer] for each in passes])[settled, rows]
