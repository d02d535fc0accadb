"""What each token adds to a text, as characters and bytes: `decode([token])` drops spaces and parts of characters."""

import codecs
import functools
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

from ..compat.names import own_tokenizer
from .remote import SYMBOLS

KEPT = 2**16  # tokens
SPACE = "▁"  # of SentencePiece


class Vocabulary:
    """The tokens of a vocabulary as bytes, in the midst of a text.

    Args:
        tokenizer: of mlx-lm.
    """

    def __init__(self, tokenizer: Any):
        self._own = own_tokenizer(tokenizer)
        detokenizer = tokenizer.detokenizer
        self.is_bytewise = isinstance(detokenizer, BPEStreamingDetokenizer)
        self.is_spaced = isinstance(detokenizer, SPMStreamingDetokenizer)
        self._trims = self.is_bytewise or getattr(detokenizer, "trim_space", False)
        self.spelled = functools.lru_cache(KEPT)(self._spelled)

    def first(self, token: int) -> bytes:
        """What a token adds to an empty text: mlx-lm takes the space away with which that begins."""
        if self.is_bytewise or self.is_spaced:
            return self.spelled(token).removeprefix(b" " if self._trims else b"")
        once: str = self._own.decode([token])
        return self.spelled(token) if "\ufffd" in once else once.encode()

    def _spelled(self, token: int) -> bytes:
        piece = self._own.convert_ids_to_tokens(token) if token < len(self._own) else None
        if piece is None:  # beyond the vocabulary, for which mlx-lm writes this
            return b"!" if self.is_bytewise else b""
        if not self.is_bytewise and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        if self.is_spaced:
            return str(piece).replace(SPACE, " ").encode()
        once = self._own.decode([token])
        if self.is_bytewise or ("\ufffd" in once and all(char in SYMBOLS for char in piece)):
            return b"".join(bytes([SYMBOLS[char]]) if char in SYMBOLS else char.encode() for char in piece)
        twice: str = self._own.decode([token, token])
        return twice[len(once) :].encode()


class Spelling:
    """The tokens of one text, which together are the text. A character belongs to the token that completes it."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_empty = True

    def alternative(self, token: int) -> bytes:
        """What a token would add."""
        return self._vocabulary.first(token) if self._is_empty else self._vocabulary.spelled(token)

    def add(self, token: int, last: bool, is_end: bool) -> tuple[str, bytes]:
        """What a token adds: nothing where it is the mark of the end."""
        added = b"" if is_end else self.alternative(token)
        text = self._decoder.decode(added, last)
        self._is_empty &= not added and (is_end or self._vocabulary.is_spaced)
        return text, added
