"""Answers that fit a schema: a grammar says which tokens may come next (llguidance), in any mode.

A `Constraint` is a logits processor of mlx-lm. Mode lossless calls processors for drafts and then for what was
verified, so a constraint is a function of the tokens that it is called with: it goes back to where they agree with
those of the call before.

To know which tokens may follow, the token before has to be known. So mlx-lm cannot run ahead of a constraint.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass

from ..compat.names import own_tokenizer
from ..errors import GearbxError, one_line
from ..files.reading import check_depth

LARGEST_SCHEMA = 2**16  # bytes, as compact JSON
KEPT = 64  # grammars of one tokenizer
WHITESPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,20}"  # as llama.cpp has it: given more, a weak model writes nothing else
FUEL, STATES = 100_000, 25_000  # llguidance's own limits allow seconds for a schema, and half a gigabyte
# The bits of minus infinity, and the integers that have as many.
MINUS_INFINITY = {
    mx.float32: (np.uint32, 0xFF800000),
    mx.float16: (np.uint16, 0xFC00),
    mx.bfloat16: (np.uint16, 0xFF80),
}


def mask_of(tokens: Iterable[int], size: int) -> np.ndarray:
    """The mask (size,) uint8 of these tokens."""
    mask = np.zeros(size, np.uint8)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return mask


def allow(logits: mx.array, mask: np.ndarray) -> mx.array:
    """Logits (1, V), minus infinity where a token is not in the mask; tokens beyond its end are not.

    Eight numbers are looked up for every byte of the mask, and added: on a CPU, MLX takes four times as long to select.
    """
    size = -(-logits.shape[-1] // 8)
    fitting = mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))
    bias = mx.array(_biases(logits.dtype).take(fitting, axis=0).reshape(-1)[: logits.shape[-1]])
    return logits + bias.view(logits.dtype)


@functools.cache
def _biases(dtype: mx.Dtype) -> np.ndarray:
    """For every byte, the bits of eight numbers (256, 8): 0 where a bit is set, else minus infinity."""
    kind, infinity = MINUS_INFINITY[dtype]
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, kind(0), kind(infinity))


@dataclasses.dataclass(frozen=True)
class Thinking:
    """The thinking part of an answer: which tokens begin and end it.

    Args:
        start, end: tokens.
        opened: the prompt has begun it, so that the text is in it from its first token on.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    opened: bool

    def over(self, text: np.ndarray) -> int | None:
        """How many of a text's first tokens belong to the thinking part, 0 without one; None while it goes on.

        Args:
            text: tokens after the prompt, (n,).
        """
        if not self.opened and not (len(text) and text[0] == self.start[0]):
            return 0
        size = len(self.end)
        places = np.flatnonzero(text == self.end[0])
        return next((int(p) + size for p in places if tuple(text[p : p + size].tolist()) == self.end), None)

    def may_start(self, text: np.ndarray) -> bool:
        """Whether the next token may begin the thinking part."""
        return not self.opened and not len(text)


def thinking_of(tokenizer: Any, opened: bool) -> Thinking | None:
    """How a model of mlx-lm's tokenizer thinks; None if it does not."""
    if not tokenizer.has_thinking:
        return None
    return Thinking(tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens), opened)


@dataclass(frozen=True)
class Text:
    """Text without any bounds, as without a response_format."""

    type: Literal["text"] = "text"


@dataclass(frozen=True)
class JsonObject:
    """A JSON object, whatever it contains."""

    type: Literal["json_object"] = "json_object"


@dataclass(frozen=True)
class Schema:
    """A JSON schema and its name. `strict` may be given, and changes nothing: every schema is kept strictly."""

    schema: dict[str, Any]
    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    strict: StrictBool | None = None


@dataclass(frozen=True)
class JsonSchema:
    """JSON that fits a schema."""

    json_schema: Schema
    type: Literal["json_schema"] = "json_schema"


ResponseFormat = Annotated[Text | JsonObject | JsonSchema, Field(discriminator="type")]


def schema_text(response_format: ResponseFormat) -> str | None:
    """The schema that an answer has to fit, as compact JSON; None for text.

    Raises:
        GearbxError: a schema that is too large or nested too deeply.
    """
    if isinstance(response_format, Text):
        return None
    if isinstance(response_format, JsonObject):
        return '{"type":"object"}'
    schema = response_format.json_schema.schema
    try:
        check_depth(schema)
    except GearbxError as error:
        raise GearbxError(f"response_format: the schema is {error}; give a flatter one") from error
    text = msgspec.json.encode(schema)
    if len(text) > LARGEST_SCHEMA:
        size = f"{len(text)} bytes, and at most {LARGEST_SCHEMA} are read"
        raise GearbxError(f"response_format: the schema has {size}; give a smaller one")
    return text.decode()


class Constraint:
    """A logits processor that leaves the tokens by which a text goes on in its grammar.

    The end of the text is among them where the grammar is complete. It serves one text: the tokens of its first call
    are the prompt, or what of it was not cached.

    Args:
        matcher: of the grammar, at its beginning; of this constraint alone.
        ends: tokens that end a text.
        thinking: the part of the text before the grammar begins.

    `error` says why the text could not be finished, such as a grammar that asks for too much time; else it is None. The
    text then ends: to raise would end the other texts of its batch.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], thinking: Thinking | None = None):
        self.error: str | None = None
        self._matcher, self._thinking = matcher, thinking
        self._first: int | None = None  # token of the text, after the prompt
        self._matched = np.zeros(0, np.int64)
        self._ends = ends
        size = len(matcher.compute_bitmask())
        self._only_ends = mask_of(ends, size)
        self._starts = mask_of(thinking.start[:1] if thinking is not None else (), size)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, V), minus infinity for tokens that may not come next.

        Args:
            tokens: of the prompt and the text, (n,).
            logits: (1, V).
        """
        mx.async_eval(logits)  # the device computes them while the mask is made
        known = np.array(tokens, copy=False)
        if self._first is None:
            self._first = len(known)
        return allow(logits, self._allowed(known[self._first :]))

    def _allowed(self, text: np.ndarray) -> np.ndarray:
        """The mask of the tokens that may follow a text without its prompt."""
        if self._thinking is None:
            return self._in_grammar(text)
        begins = self._thinking.over(text)
        if begins is None:
            return ~self._only_ends
        mask = self._in_grammar(text[begins:])
        return mask | self._starts if self._thinking.may_start(text) else mask

    def _in_grammar(self, text: np.ndarray) -> np.ndarray:
        """The mask of the tokens that may follow a text of the grammar."""
        if len(text) and int(text[-1]) in self._ends:  # mlx-lm asks for one token more
            return self._only_ends
        common = shared(self._matched, text)
        if common < len(self._matched):
            self._matcher.rollback(len(self._matched) - common)
        taken = common + self._matcher.try_consume_tokens(text[common:].tolist())
        self._matched = text[:taken].astype(np.int64)
        if self._matcher.is_error():
            return self._ended(f"{one_line_of(self._matcher)}; give a smaller schema")
        if taken < len(text):
            return self._ended("another logits processor chose a token that does not fit")
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return self._ended(one_line_of(self._matcher)) if self._matcher.is_error() else mask

    def _ended(self, why: str) -> np.ndarray:
        self.error = f"response_format: the answer cannot be finished ({why})"
        return self._only_ends


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts begin with in common."""
    size = min(len(a), len(b))
    same = a[:size] == b[:size]
    return size if same.all() else int(same.argmin())


class Grammars:
    """The grammars of one tokenizer. Each is compiled once, and the last 64 are kept.

    Args:
        tokenizer: of mlx-lm.

    Raises:
        GearbxError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._tokenizer = tokens_of(tokenizer, self._ends)
        self._compiled = functools.lru_cache(KEPT)(functools.partial(compiled, self._tokenizer))

    def constraint(self, schema: str, thinking: Thinking | None = None) -> Constraint:
        """A constraint for one text.

        Args:
            schema: JSON.

        Raises:
            GearbxError: a schema that cannot be kept, or asks for too much time or memory.
        """
        return Constraint(self._compiled(schema).deep_copy(), self._ends, thinking)


def tokens_of(tokenizer: Any, ends: frozenset[int]) -> Any:
    """llguidance's view of a tokenizer, which takes about a second to make.

    Raises:
        GearbxError: llguidance cannot read the tokenizer.
    """
    try:
        return from_tokenizer(own_tokenizer(tokenizer), eos_token=sorted(ends))
    except Exception as error:
        raise GearbxError(
            f"response_format: the model's tokenizer cannot be used for it ({one_line(error)}); leave it out"
        ) from error


def compiled(tokens: Any, schema: str) -> Any:
    """A matcher at the beginning of a schema's grammar.

    Args:
        tokens: llguidance's view of a tokenizer.
        schema: JSON.

    Raises:
        GearbxError: a schema that cannot be kept, or asks for too much time or memory.
    """
    remedy = "give another schema"
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GearbxError(f"response_format: the schema cannot be read ({one_line(error)}); {remedy}") from error
    limits = LLParserLimits(initial_lexer_fuel=FUEL, max_lexer_states=STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what no text can fit is found here
    if matcher.is_error():
        raise GearbxError(f"response_format: no grammar for this schema ({one_line_of(matcher)}); {remedy}")
    return matcher


def one_line_of(matcher: Any) -> str:
    """What a matcher says of its error, in one line."""
    return one_line(ValueError(matcher.get_error().replace("<non-verbose/>", "")))


_grammars: WeakKeyDictionary[Any, Grammars] = WeakKeyDictionary()


def constraint_for(tokenizer: Any, response_format: ResponseFormat | None, thinking: bool = False) -> Constraint | None:
    """A logits processor for one answer that has to fit a response_format; None for text, or without one.

    It has to be the last of the logits processors.

    Args:
        tokenizer: of mlx-lm.
        thinking: the prompt ends within the thinking part. Where a model begins to think by itself is seen.

    Raises:
        GearbxError: the schema cannot be kept, or llguidance cannot read the tokenizer.
    """
    schema = None if response_format is None else schema_text(response_format)
    if schema is None:
        return None
    if tokenizer not in _grammars:
        _grammars[tokenizer] = Grammars(tokenizer)
    return _grammars[tokenizer].constraint(schema, thinking_of(tokenizer, thinking))
