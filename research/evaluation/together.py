"""Many sequences at once in modes that choose a gear or a model for each token.

In the package's batches all sequences of a step share a gear, which would change the tokens of these modes. Here a
sequence is a generator: it yields the pass that it needs next, and receives the entropy and the most likely token.
Passes of different sequences in the same gear are computed together, one row for each token.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from gearbx_mlx.decoding.kickdown import Kickdown
from gearbx_mlx.decoding.pair import Pair
from gearbx_mlx.decoding.route import Route
from gearbx_mlx.decoding.sampling import Choice, Chooser, LogitsReader, choose_rows
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.ranks.agreement import SINGLE_PROCESS
from gearbx_mlx.routing.gates import RUN_AHEAD
from gearbx_mlx.routing.pair import first_model, pair_gate, pair_monitor

ALONE = 16  # tokens; a longer pass is computed without other sequences


class Text:
    """Tokens of a prompt and of its continuation. units: gear or model of each generated token."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens, self.prompt = list(prompt), len(prompt)
        self.units: list[int] = []

    @property
    def last(self) -> int:
        """The position of the last token."""
        return len(self.tokens) - 1

    def add(self, token: int, unit: int) -> None:
        self.tokens.append(token)
        self.units.append(unit)


class Pass(NamedTuple):
    """A pass over the tokens of a sequence from position `start` to before `end`. unit: its gear or model."""

    unit: int
    start: int
    end: int

    @property
    def is_prompt(self) -> bool:
        """True for the first pass in a model, of which only keys and values are wanted."""
        return self.start == 0

    @property
    def is_alone(self) -> bool:
        """True for a pass that no other sequence shares."""
        return self.end - self.start > ALONE


class Seen(NamedTuple):
    """The most likely token after a pass, and the entropy of the distribution (bits)."""

    token: int
    entropy: float


Passes = Generator[Pass, Seen, None]
"""The passes of a sequence: first that of its prompt without the last token. It adds each token to its text."""


def routed(text: Text, mode: Route, gearbox: Gearbox, tokenizer: Any) -> Passes:
    """Mode route: the entropy of a token chooses the gear of the second one after it."""
    state = mode.sequence(gearbox, tokenizer, text.tokens)
    yield Pass(state.prompt_gear.index, 0, text.last)
    gears = deque([state.first.index] * RUN_AHEAD)
    while True:
        gear = gears.popleft()
        seen = yield Pass(gear, text.last, text.last + 1)
        text.add(seen.token, gear)
        gears.append(state.gate.update(state.monitor.update(seen.entropy)))


def kicked_down(text: Text, mode: Kickdown, gearbox: Gearbox, tokenizer: Any) -> Passes:
    """Mode kickdown: a higher gear computes an uncertain token again, at the same position of the KV cache."""
    is_unsure, top = mode.rule_for(gearbox), gearbox.ladder.top.index
    yield Pass(mode.gears_of_text(gearbox)[0].index, 0, text.last)
    while True:
        for gear in range(top + 1):
            seen = yield Pass(gear, text.last, text.last + 1)
            if gear == top or not is_unsure(seen.entropy, len(text.units), gear):
                break
        text.add(seen.token, gear)


def alternating(text: Text, mode: Pair, large: nn.Module, vocab_size: int) -> Passes:
    """Mode pair: entropy chooses the model of the next token, which first reads the tokens that it missed."""
    threshold = mode.threshold_with(large)
    gate, monitor = pair_gate(threshold, mode.min_gear_duration), pair_monitor(vocab_size, mode.window)
    model, read = first_model(threshold), [0, 0]
    gate.reset(model)
    while True:
        if not read[model]:
            read[model] = text.prompt - 1
            yield Pass(model, 0, read[model])
        seen = yield Pass(model, read[model], text.last + 1)
        read[model] = text.last + 1
        text.add(seen.token, model)
        model = gate.update(monitor.update(seen.entropy))


class Slots:
    """KV cache of one layer for several sequences. A row of a pass is one token of one sequence.

    Attributes:
        keys, values: (S, H, T, D), of S sequences with T positions, after the first tokens.
        sequences, positions: (R,), of the rows of the pass.
    """

    def __init__(self, sequences: int, length: int):
        self._count, self._length = sequences, length
        self.keys: mx.array
        self.values: mx.array

    def set_rows(self, sequences: mx.array, positions: mx.array, reach: int) -> None:
        """Set the rows of the next pass. reach: positions below it are in use."""
        self.sequences, self.positions, self._reach = sequences, positions, reach

    def entry(self, sequence: int, tokens: int) -> KVCache:
        """Return mlx-lm's cache of a sequence with its first tokens."""
        cache = KVCache()
        if tokens:
            cache.update_and_fetch(*(part[sequence : sequence + 1, :, :tokens] for part in (self.keys, self.values)))
        return cache

    def set_entry(self, sequence: int, cache: KVCache) -> None:
        """Copy a sequence's cache from mlx-lm's."""
        keys, values = (part[..., : cache.offset, :] for part in (cache.keys, cache.values))
        if not hasattr(self, "keys"):
            self.keys, self.values = (
                mx.zeros((self._count, part.shape[1], self._length, part.shape[3]), part.dtype)
                for part in (keys, values)
            )
        self.keys[sequence, :, : cache.offset] = keys[0]
        self.values[sequence, :, : cache.offset] = values[0]

    # Interface of mlx-lm's caches.

    @property
    def offset(self) -> mx.array:
        return self.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values (R, H, 1, D), and return those of each row's sequence (R, H, reach, D)."""
        self.keys[self.sequences, :, self.positions] = keys[:, :, 0]
        self.values[self.sequences, :, self.positions] = values[:, :, 0]
        return self.keys[:, :, : self._reach][self.sequences], self.values[:, :, : self._reach][self.sequences]

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which positions each row attends to (R, 1, 1, reach): up to its own."""
        return (mx.arange(self._reach) <= self.positions[:, None])[:, None, None]


class Units:
    """Gears or models that compute the passes of several sequences, as the modes do one sequence at a time.

    Args:
        models: of each unit. Gears have the same one, and share its KV cache.
        shift: engages a unit.
        reader: of logits.
        vocab_size: logits beyond are ignored.
        sequences: most at once.
        length: most tokens of a sequence.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        shift: Callable[[int], Any],
        reader: LogitsReader,
        vocab_size: int,
        sequences: int,
        length: int,
    ):
        self.models, self._shift, self._reader, self.vocab_size = models, shift, reader, vocab_size
        self.sequences = sequences
        slots = {id(model): [Slots(sequences, length) for _ in make_prompt_cache(model)] for model in models}
        self._slots = [slots[id(model)] for model in models]
        self._prompts: dict[tuple[int, ...], list[KVCache]] = {}  # of a unit and its tokens

    def compute(self, unit: int, wanted: Sequence[tuple[int, Text, Pass]]) -> list[Seen]:
        """Compute passes of sequences, by their numbers, in one unit: one pass alone, or several others."""
        self._shift(unit)
        if wanted[0][2].is_alone:
            return self._seen(self._alone(unit, *wanted[0]))
        rows = [(number, at, text.tokens[at]) for number, text, each in wanted for at in range(each.start, each.end)]
        sequences, positions, tokens = map(mx.array, zip(*rows))
        last = mx.cumsum(mx.array([each.end - each.start for _, _, each in wanted])) - 1
        reach = max(each.end for _, _, each in wanted)
        for slots in self._slots[unit]:
            slots.set_rows(sequences, positions, reach)
        logits = self.models[unit](tokens[:, None], cache=self._slots[unit])[:, 0]
        mx.eval(logits, [[slots.keys, slots.values] for slots in self._slots[unit]])
        return self._seen(logits if len(wanted) == len(rows) else logits[last])

    def read_prompt(self, unit: int, number: int, tokens: Sequence[int]) -> None:
        """Put the keys and values of a sequence's first tokens in its cache; the same tokens are computed only once."""
        known = (unit, *tokens)
        if known not in self._prompts:
            self._shift(unit)
            cache = make_prompt_cache(self.models[unit])
            self.models[unit](mx.array([tokens]), cache=cache)
            mx.eval([[each.keys, each.values] for each in cache])
            self._prompts[known] = cache
        for slots, entry in zip(self._slots[unit], self._prompts[known]):
            slots.set_entry(number, entry)

    def _alone(self, unit: int, number: int, text: Text, wanted: Pass) -> mx.array:
        """Return the logits (1, V) after a long pass of one sequence."""
        cache = [slots.entry(number, wanted.start) for slots in self._slots[unit]]
        logits = self.models[unit](mx.array([text.tokens[wanted.start : wanted.end]]), cache=cache)[:, -1]
        for slots, entry in zip(self._slots[unit], cache):
            slots.set_entry(number, entry)
        mx.eval(logits, [[slots.keys, slots.values] for slots in self._slots[unit]])
        return logits

    def _seen(self, logits: mx.array) -> list[Seen]:
        rows = choose_rows(Chooser(), self._reader, SINGLE_PROCESS, logits[:, : self.vocab_size])
        tokens, choices, _ = rows.read(SINGLE_PROCESS)
        return [Seen(*each) for each in zip(tokens, choices[:, Choice.ENTROPY].tolist())]


@dataclass
class Running:
    """A sequence in work: its number among all, its text, its passes, the next one, and how many each unit made."""

    number: int
    text: Text
    passes: Passes
    next: Pass
    made: list[int]


def together(
    units: Units, texts: Sequence[tuple[Text, Passes]], is_finished: Callable[[int, Text], bool]
) -> Iterator[tuple[int, Text, list[int]]]:
    """Generate sequences, and yield each with its number and the passes of each unit after its prompt.

    The unit that the most sequences need computes next.

    Args:
        is_finished: of a sequence's number and text, after each of its tokens.
    """
    waiting, running = deque(enumerate(texts)), dict[int, Running]()
    free = deque(range(units.sequences))
    while waiting or running:
        while waiting and free:
            number, (text, passes) = waiting.popleft()
            slot = free.popleft()
            running[slot] = Running(number, text, passes, next(passes), [0] * len(units.models))
        for slot, one in running.items():
            while one.next.is_prompt:
                units.read_prompt(one.next.unit, slot, one.text.tokens[: one.next.end])
                one.next = one.passes.send(Seen(0, 0.0))
        needs = [each.next.unit for each in running.values()]
        unit = max(set(needs), key=needs.count)
        chosen = [slot for slot, each in running.items() if each.next.unit == unit]
        chosen = [slot for slot in chosen if running[slot].next.is_alone][:1] or chosen
        found = units.compute(unit, [(slot, running[slot].text, running[slot].next) for slot in chosen])
        for slot, seen in zip(chosen, found):
            one = running[slot]
            one.made[unit] += 1
            known = len(one.text.tokens)
            one.next = one.passes.send(seen)
            if len(one.text.tokens) > known and is_finished(one.number, one.text):
                yield one.number, one.text, one.made
                del running[slot]
                free.append(slot)
