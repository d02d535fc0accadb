"""N-gram table of all sequences read: the token that most recently followed the last 4, 3, 2 or 1 tokens.

Answers quote their prompt, code repeats names, and an edit copies its source. The longest known run of last tokens
predicts the next ones without reading weights, as llama.cpp's `lookup` and suffix decoding (2411.04975) do. A draft is
the tokens that followed the run: each of these tokens makes the run longer by one.

The acceptance rate depends on the length of the run, on whether it is in the same sequence, and on whether the table
predicted that token when it was written. All are known for every token of a draft, and every generated token updates
its rate, proposed or not.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from .gates import RunningMean

LONGEST_NGRAM = 4  # tokens of a key of the table
LONGEST_RUN = 16  # tokens; longer runs count as the longest
MAX_TOKENS = 2**18  # read tokens; then the older half is dropped
SLOTS = 8  # slots per token: four n-grams fill half of them
FIRST_SIZE = 2**9  # tokens of a new table
MULTIPLIER, BITS = 0x9E3779B1, 32  # multiplicative hash (Knuth, 6.4)
SEPARATOR = -1  # between two sequences

# Acceptance rates before any observation, by the shortest run of a class: of tokens that the table did not predict
# when they were written, and of those that it did. They are below those of Qwen2.5-Coder-1.5B, which repeats itself
# rarely (0.16 and 0.29 for runs of one token, 0.37 and 0.58, 0.44 and 0.65, 0.68 and 0.90, ...).
PRIOR = {
    1: (0.08, 0.15),
    2: (0.25, 0.4),
    3: (0.35, 0.55),
    4: (0.45, 0.7),
    6: (0.6, 0.85),
    9: (0.7, 0.9),
    16: (0.85, 0.97),
}
EARLIER = 0.6  # times as high for runs in earlier sequences
PRIOR_WEIGHT, WEIGHT_KEPT = 16.0, 0.995  # tokens that the prior counts as; share of its weight that each new one leaves
MIN_PROBABILITY = 0.02  # least probability of a whole draft; less likely ones end earlier


def rates_of_class(run: int) -> list[list[RunningMean]]:
    """Return rates by whether a run is in the same sequence, and whether the table predicted the token."""
    return [[RunningMean(WEIGHT_KEPT, share * rate, PRIOR_WEIGHT) for rate in PRIOR[run]] for share in (EARLIER, 1.0)]


class NgramTable:
    """Latest successors of runs of 1 to 4 tokens. Reading a token takes constant time.

    Read tokens are one array: 2 * token, + 1 if the table predicted it, and `SEPARATOR` between sequences. By the hash
    of an n-gram, `_slots` has the place of its latest successor. A newer n-gram of the same hash takes the slot, so
    each hit is compared with the read tokens. That takes 4 + 4 * `SLOTS` bytes per token.

    Args:
        tokens: read before, as `tokens` returns them.
        limit: read tokens, after which the older half is dropped.
    """

    def __init__(self, tokens: Sequence[int] = (), limit: int = MAX_TOKENS):
        self._limit = limit
        self._read, self._start = array("i", tokens), len(tokens)
        self.unsaved = 0
        """Number of tokens read since a caller set it to 0."""
        self.run = 0
        """Number of last tokens that occurred before, up to `LONGEST_RUN`; 0 if the last one is new."""
        self._place = 0  # place of the token after them
        self._slots_of_last = list[int]()  # slots of the n-grams that end with the last token, shortest first
        classes = {run: rates_of_class(run) for run in PRIOR}
        self._rates = [classes[max(run for run in PRIOR if run <= max(length, 1))] for length in range(LONGEST_RUN + 1)]
        self._rebuild()
        self.begin()

    @property
    def tokens(self) -> "array[int]":
        """All read tokens, for a later table."""
        return self._read

    def begin(self, tokens: Sequence[int] = (), reader: object = None) -> int:
        """Begin a sequence, or continue the latest one if `tokens` starts with its tokens.

        Args:
            reader: owner of the sequence.

        Returns:
            the number of tokens that are read already.
        """
        self.reader = reader
        known = [each >> 1 for each in self._read[self._start :]]
        if known and [*tokens[: len(known)]] == known:
            return len(known)
        if self._read and self._read[-1] != SEPARATOR:
            self._read.append(SEPARATOR)
            self.unsaved += bool(self.unsaved)  # it is within the unsaved ones
        self._start = len(self._read)
        self._find()
        return 0

    def read(self, token: int, is_generated: bool = False) -> None:
        """Read the next token of the sequence. A generated one updates an acceptance rate."""
        predicted = self.run > 0 and self._read[self._place] >> 1 == token
        if is_generated and self.run:
            self._rates[self.run][self._place >= self._start][self._read[self._place] & 1].add(predicted)
        for slot in self._slots_of_last:
            self._slots[slot] = len(self._read)
        self._read.append(2 * token + predicted)
        self.unsaved += 1
        if len(self._read) > self._size:
            self._rebuild()
            self._find()
        elif predicted and self.run >= LONGEST_NGRAM and self._read[self._place + 1] >= 0:  # a copied passage continues
            self._slots_of_last = self._hashes()
            self.run, self._place = min(self.run + 1, LONGEST_RUN), self._place + 1
        else:
            self._find()

    def proposed(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest known run; none if the last token is new.

        After the end of the sequence, the proposal repeats its own beginning, as LZ77 does: cyclic outputs continue.
        """
        if not self.run:
            return []
        found = [each >> 1 for each in self._read[self._place : self._place + count]]
        if SEPARATOR in found:
            return found[: found.index(SEPARATOR)]
        return (found * -(-count // len(found)))[:count]

    def probabilities(self, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... of `proposed` are all accepted, up to `count` of them."""
        if not self.run:
            return []
        product, found, is_own = 1.0, list[float](), self._place >= self._start
        following = self._read[self._place : self._place + count]
        for place in range(count):
            each = following[place % len(following)]
            product *= self._rates[min(self.run + place, LONGEST_RUN)][is_own][each & 1].value
            if each == SEPARATOR or product < MIN_PROBABILITY:
                break
            found.append(product)
        return found

    def _hashes(self) -> list[int]:
        """Return the slots of the n-grams that end with the last token, the shortest first."""
        found, hashed = list[int](), 0
        for each in self._read[: -LONGEST_NGRAM - 1 : -1]:
            if each < 0:
                break
            hashed = (hashed + (each >> 1) + 1) * MULTIPLIER & 2**BITS - 1
            found.append(hashed >> self._shift)
        return found

    def _find(self) -> None:
        """Find the place after the latest earlier occurrence of the longest n-gram, and the length of the run."""
        self._slots_of_last = self._hashes()
        self.run, self._place = 0, 0
        for count in range(len(self._slots_of_last), 0, -1):
            place = self._slots[self._slots_of_last[count - 1]]
            run = self._common(place)
            if run >= count:
                self.run, self._place = run, place
                return

    def _common(self, place: int) -> int:
        """Return how many tokens before a place equal the last ones, up to `LONGEST_RUN`."""
        read, run = self._read, 0
        offset = len(read) - place
        for before in range(place - 1, max(place - 1 - LONGEST_RUN, -1), -1):
            each = read[before]
            if each < 0 or each >> 1 != read[before + offset] >> 1:
                break
            run += 1
        return run

    def _rebuild(self) -> None:
        """Make the slots anew, with room for more tokens; above the limit, drop the older half first."""
        if len(self._read) > self._limit:
            dropped = len(self._read) - self._limit // 2
            del self._read[:dropped]
            self._start = max(0, self._start - dropped)
        self._size = FIRST_SIZE
        while self._size <= len(self._read):
            self._size *= 2
        count = SLOTS * self._size
        self._shift = BITS - (count.bit_length() - 1)
        slots, read = np.zeros(count, np.int32), np.array(self._read, np.int32)
        tokens, hashed = read.astype(np.uint64) >> np.uint64(1), np.zeros(max(len(read) - 1, 0), np.uint64)
        is_text = read[1:] >= 0  # tokens with a successor
        for count in range(min(LONGEST_NGRAM, len(hashed))):
            before = np.concatenate([np.zeros(count, np.uint64), tokens[: len(hashed) - count]])
            is_text[count:] &= read[: len(hashed) - count] >= 0
            is_text[:count] = False
            hashed = (hashed + before + np.uint64(1)) * np.uint64(MULTIPLIER) & np.uint64(2**BITS - 1)
            places = np.flatnonzero(is_text)
            slots[hashed[places] >> np.uint64(self._shift)] = places + 1
        self._slots = array("i", slots.tobytes())
