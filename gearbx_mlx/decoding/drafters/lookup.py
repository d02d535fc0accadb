"""Prompt lookup: proposals are copied from where the sequence's last tokens occurred before (n-grams).

The table of n-grams lives with the model and learns from all of its sequences, so the tenth answer of a chat is drafted
from the nine before it. `Lossless(remember=...)` keeps it for later starts, `share_lookup=False` makes one for each
sequence: a server must not let one client's tokens speed up another client's.
"""

import hashlib
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from ...errors import GearbxWarning
from ...files.measured_file import MeasuredFile
from ...files.user_cache import CacheUnusable, check_owner, warn_of
from ...routing.ngrams import MAX_TOKENS, SEPARATOR, NgramTable
from ..policy import MAX_DRAFTED, LearnedPolicy
from ..response import LOOKUP, GeneratedText
from ..rows import Proposal
from . import Drafter, DraftTarget

CONTEXT = 16  # last tokens of a sequence that are read again after another sequence has used the table
PROBE = "0123 Größe 漢字 naïve\n\tdef f(x):  return x + 1;"  # text whose tokens tell tokenizers apart


class Lookup(Drafter):
    """Prompt lookup by the longest run of last tokens that occurred before.

    Args:
        table: of n-grams, for one sequence at a time.
        most: tokens per proposal.
    """

    reads_weights = False
    name, cost = "prompt lookup", 0.0

    def __init__(self, table: NgramTable, most: int = MAX_DRAFTED):
        self.table, self._most = table, most
        self._text: Sequence[int] = []
        self._count = 0  # tokens of the sequence that the table has read

    @classmethod
    def of(cls, target: DraftTarget) -> "Lookup | None":
        """Return the lookup of a sequence; None without prompt lookup."""
        if not target.lookup_tokens:
            return None
        return cls(target.table or NgramTable(), target.lookup_tokens)

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return how many of the tokens after the longest match save time if they are verified."""
        self.follow(text.tokens, text.prompt)
        room = min(room, self._most)
        return policy.lookup_length(self.table.probabilities(room)) if room > 0 else 0

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        tokens = self.table.proposed(length)
        last = next((place for place, token in enumerate(tokens, 1) if token in text.ends), length)
        return Proposal(tokens[:last], source=LOOKUP)

    def update(self, text: GeneratedText, found: Any) -> None:
        self.follow(text.tokens, text.prompt)

    def follow(self, tokens: Sequence[int], prompt: int) -> None:
        """Read the new tokens of a sequence: the same list, now longer or cut at its end, or a different one.

        Args:
            prompt: number of its tokens; they do not count for acceptance rates.
        """
        if tokens is not self._text:
            self._text, self._count = tokens, self.table.begin(tokens, self)
        self._count = min(self._count, len(tokens))  # the last tokens of a sequence may never be yielded
        first_new = max(prompt, self._count)
        if self.table.reader is not self:  # another sequence was read meanwhile
            self.table.begin((), self)
            self._count -= min(CONTEXT, self._count)
        for place in range(self._count, len(tokens)):
            self.table.read(tokens[place], is_generated=place >= first_new)
        self._count = len(tokens)


DAMAGED = "is damaged"


class RememberedFile(msgspec.Struct):
    """File of a table's tokens. tokens: little-endian int32 numbers, encoded as in `NgramTable`."""

    tokenizer: str = ""
    tokens: bytes = b""


class LookupMemory:
    """Table of n-grams of all sequences of a gearbox, and its file if it has one.

    Args:
        file: a path, which processes may share; True: in the user's cache; False: no file.
        tokenizer: of the model, with `vocabulary` tokens.
    """

    def __init__(self, file: Path | str | bool, tokenizer: Any, vocabulary: int):
        self._key, self._vocabulary = hashlib.sha256(str(tokenizer.encode(PROBE)).encode()).hexdigest()[:16], vocabulary
        about = "tokens of prompt lookup", "it will be replaced", "this sequence is not remembered"
        self._file: MeasuredFile[RememberedFile] | None = None
        if file:
            name = f"{self._key}.lookup" if isinstance(file, bool) else own_file(Path(file))
            self._file = None if name is None else MeasuredFile(name, RememberedFile, *about)
        self.table = NgramTable(self._remembered(self._file) if self._file else ())

    @classmethod
    def of(cls, gearbox: Any, file: Path | str | bool, tokenizer: Any, vocabulary: int) -> "LookupMemory":
        """Return the memory of a gearbox and a file, made at its first use."""
        known = _memories.setdefault(gearbox, {})
        if file not in known:
            known[file] = cls(file, tokenizer, vocabulary)
        return known[file]

    def save(self) -> None:
        """Add the tokens that the table has read since the last time to the file; keep those of other processes."""
        unsaved, self.table.unsaved = self.table.unsaved, 0
        if self._file is None or not unsaved:
            return

        def add(content: RememberedFile) -> None:
            tokens = self._read(content)[0] + array("i", [SEPARATOR]) + self.table.tokens[-unsaved:]
            content.tokenizer, content.tokens = self._key, tokens[-MAX_TOKENS // 2 :].tobytes()

        self._file.change(add)

    def _remembered(self, file: MeasuredFile[RememberedFile]) -> "array[int]":
        """Return the tokens in the file; none, with a warning, if they cannot be used."""
        found, problem = self._read(file.read())
        if problem:
            warnings.warn(f"{file.place()}: {problem}; {file.remedy}", GearbxWarning, stacklevel=5)
        return found

    def _read(self, content: RememberedFile) -> tuple["array[int]", str]:
        """Return the tokens, or none and the reason."""
        found = array("i")
        if content.tokens and content.tokenizer != self._key:
            return found, "has tokens of a different tokenizer"
        if len(content.tokens) % found.itemsize:
            return found, DAMAGED
        found.frombytes(content.tokens)
        if found and not (min(found) >= SEPARATOR and max(found) >> 1 < self._vocabulary):
            return array("i"), DAMAGED
        return found, ""


def own_file(path: Path) -> Path | None:
    """Return a path; None, with a warning, if it cannot be used."""
    try:
        check_owner(path)
        return path
    except CacheUnusable as error:
        warn_of(error)
    except OSError as error:
        warn_of(CacheUnusable(f"{path}: cannot be used ({error.strerror}); choose another place"))
    return None


_memories: WeakKeyDictionary[Any, dict[Path | str | bool, LookupMemory]] = WeakKeyDictionary()
