"""Structured output and forced tool calls in any mode: a grammar masks the next token (llguidance).

A `Constraint` is a logits processor of mlx-lm. Mode lossless calls processors for drafted and then for verified
tokens, so a constraint rolls back to the common prefix with its previous call.

The mask depends on the previous token. So mlx-lm cannot compute the next token ahead of a constraint.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass

from ..compat.classes import own_tokenizer
from ..decoding.caches import in_common
from ..errors import GearbxError, one_line
from ..files.reading import check_depth

MAX_SCHEMA_BYTES = 2**16  # bytes, as compact JSON
WHITESPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,20}"  # llama.cpp's; weak models would repeat unbounded whitespace
FORMAT, CHOICE = "response_format", "tool_choice"
BIAS = np.array([-np.inf, 0], np.float32)  # added to logits of forbidden and allowed tokens


def mask_of(tokens: Iterable[int], size: int) -> np.ndarray:
    """Return a boolean mask (size,) that is True for these tokens."""
    return np.isin(np.arange(size), [*tokens])


def allow(logits: mx.array, mask: np.ndarray) -> mx.array:
    """Return logits (1, V) with minus infinity outside the mask (n,) and beyond its end.

    On a CPU, selection with NumPy takes a third of MLX's time.
    """
    size = logits.shape[-1]
    fitting = mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))
    return logits + mx.array(BIAS.take(fitting)).astype(logits.dtype)


@dataclasses.dataclass(frozen=True)
class Thinking:
    """The thinking part of an answer.

    Attributes:
        start, end: token sequences of its marks.
        opened: the prompt ends with the start mark.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    opened: bool

    def size_in(self, tokens: np.ndarray) -> int | None:
        """Return the number of thinking tokens at the start of an answer (n,); None before the end mark."""
        if not self.opened and not (len(tokens) and tokens[0] == self.start[0]):
            return 0
        size = len(self.end)
        places = np.flatnonzero(tokens == self.end[0])
        return next((int(p) + size for p in places if tuple(tokens[p : p + size].tolist()) == self.end), None)


@dataclass(frozen=True)
class Schema:
    """A JSON schema and its name. `strict` has no effect: every schema is enforced."""

    schema: dict[str, Any]
    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    strict: StrictBool | None = None


@dataclass(frozen=True)
class ResponseFormat:
    """Unconstrained text, any JSON object, or JSON that conforms to a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A grammar's source."""

    field: str  # the request's field
    text: str  # a JSON schema, or a Lark grammar of tool calls


def schema_grammar(response_format: ResponseFormat | None) -> Grammar | None:
    """Return the grammar of a response format; None for text. Raises GearbxError."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return Grammar(FORMAT, '{"type":"object"}')
    if response_format.json_schema is None:
        raise GearbxError(f"{FORMAT}: no json_schema; set it, or use the type json_object")
    return Grammar(FORMAT, checked_schema(FORMAT, response_format.json_schema.schema))


def checked_schema(field: str, schema: Any) -> str:
    """Return a schema as compact JSON. Raises GearbxError for a large or deeply nested one."""
    try:
        check_depth(schema)
    except GearbxError as error:
        raise GearbxError(f"{field}: schema is {error}; use a flatter one") from error
    text = msgspec.json.encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise GearbxError(f"{field}: schema too large, got {len(text)} bytes; use at most {MAX_SCHEMA_BYTES}")
    return text.decode()


def function_name(tool: dict[str, Any]) -> Any:
    """Return the function name of OpenAI's object of a tool; None for an invalid object."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def call_grammar(tokenizer: Any, tools: Sequence[Any]) -> Grammar:
    """Return the grammar of a call of any of OpenAI's tools in the model's syntax, with arguments by its schema.

    Raises:
        GearbxError: a tool without a name, or a model without tool calls in JSON.
    """
    calls = []
    for tool in tools:
        name = function_name(tool)
        if not isinstance(name, str) or not name:
            raise GearbxError(f"{CHOICE}: a tool has no function.name; set it")
        before, after = call_syntax(tokenizer, name, tools)
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, dict):
            parameters = {"type": "object"}
        schema = checked_schema(CHOICE, parameters | {"x-guidance": {"whitespace_pattern": WHITESPACE}})
        calls.append(f"{json.dumps(before)} %json {schema} {json.dumps(after)}")
    marks = [mark_of(tokenizer, mark) for mark in (tokenizer.tool_call_start, tokenizer.tool_call_end)]
    return Grammar(CHOICE, f"start: {marks[0]} call {marks[1]}\ncall: " + "\n    | ".join(calls))


def call_syntax(tokenizer: Any, name: str, tools: Sequence[Any]) -> tuple[str, str]:
    """Return the text before and after a call's arguments, in the first syntax that the model's parser accepts."""
    syntaxes = (f'\n{{"name": {json.dumps(name)}, "arguments": ', "}\n"), (f"{name}[ARGS]", "")
    for before, after in syntaxes if tokenizer.tool_parser is not None else ():
        with contextlib.suppress(Exception):  # parsers raise any type of error
            call = tokenizer.tool_parser(f"{before}{{}}{after}", tools)
            call = call[0] if isinstance(call, list) else call
            if call["name"] == name and call["arguments"] in ({}, "{}"):
                return before, after
    raise GearbxError(f"{CHOICE}: this model's tool calls cannot be forced; omit it, or use auto")


def mark_of(tokenizer: Any, mark: str | None) -> str:
    """Return a tool-call mark in Lark's syntax: a special token, or text."""
    own = own_tokenizer(tokenizer)
    number = own.convert_tokens_to_ids(mark) if mark else None
    added = own.added_tokens_decoder.get(number)
    return f"<[{number}]>" if added is not None and added.special else json.dumps(mark or "")


class Constraint:
    """A logits processor that allows only the tokens of a grammar.

    A complete grammar also allows end-of-sequence tokens. The object serves one sequence: its first call has the
    tokens of the prompt, without cached ones.

    Args:
        matcher: a fresh matcher of the grammar.
        ends: end-of-sequence tokens.
        thinking: part of the answer before the grammar starts.
        field: of the request.

    Attributes:
        error: reason for an incomplete answer, or None. The answer ends without an exception, because one would end
            all sequences of its batch.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], thinking: Thinking | None = None, field: str = FORMAT):
        self.error: str | None = None
        self.field = field
        self._matcher, self._thinking = matcher, thinking
        self._first: int | None = None  # index of the answer's first token
        self._matched = np.zeros(0, np.int64)
        self._ends = ends
        size = len(matcher.compute_logit_bias())
        self._only_ends = mask_of(ends, size)
        self._starts = mask_of(thinking.start[:1] if thinking is not None else (), size)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits (1, V) with minus infinity for forbidden tokens, after the tokens (n,) of prompt and answer."""
        mx.async_eval(logits)  # overlaps with the computation of the mask
        known = np.array(tokens, copy=False)
        if self._first is None:
            self._first = len(known)
        return allow(logits, self._allowed(known[self._first :]))

    def _allowed(self, answer: np.ndarray) -> np.ndarray:
        """Return the mask of allowed tokens after an answer's tokens (n,)."""
        if self._thinking is None:
            return self._in_grammar(answer)
        start = self._thinking.size_in(answer)
        if start is None:
            return ~self._only_ends
        mask = self._in_grammar(answer[start:])
        return mask if self._thinking.opened or len(answer) else mask | self._starts

    def _in_grammar(self, tokens: np.ndarray) -> np.ndarray:
        """Return the mask of allowed tokens after tokens (n,) of the grammar."""
        if len(tokens) and int(tokens[-1]) in self._ends:  # mlx-lm computes one token more
            return self._only_ends
        common = in_common(self._matched, tokens)
        if common < len(self._matched):
            self._matcher.rollback(len(self._matched) - common)
        consumed = common + self._matcher.try_consume_tokens(tokens[common:].tolist())
        self._matched = tokens[:consumed].astype(np.int64)
        if self._matcher.is_error():
            return self._end(f"{one_line_of(self._matcher)}; use a smaller schema")
        if consumed < len(tokens):
            return self._end("a different logits processor allowed a token outside the grammar")
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        return self._end(one_line_of(self._matcher)) if self._matcher.is_error() else mask

    def _end(self, why: str) -> np.ndarray:
        """Return the mask that ends the answer, with an error."""
        self.error = f"{self.field}: the answer cannot be finished ({why})"
        return self._only_ends


def grammar_tokens(tokenizer: Any) -> Any:
    """Return llguidance's form of a tokenizer, in about a second. Raises GearbxError if it is not supported."""
    try:
        return from_tokenizer(own_tokenizer(tokenizer), eos_token=sorted(tokenizer.eos_token_ids))
    except Exception as error:
        why = f"the model's tokenizer supports neither response_format nor tool_choice ({one_line(error)})"
        raise GearbxError(f"{why}; omit them") from error


def matcher_of(tokens: Any, grammar: Grammar) -> Any:
    """Return a fresh matcher of a grammar, with the result of `grammar_tokens`.

    Raises:
        GearbxError: an unsupported schema, or one that needs too much time or memory.
    """
    remedy = "use a different schema"
    try:
        if grammar.field == CHOICE:
            source = LLMatcher.grammar_from_lark(grammar.text)
        else:
            source = LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GearbxError(f"{grammar.field}: invalid schema ({one_line(error)}); {remedy}") from error
    # llguidance's default limits allow seconds and half a gigabyte per schema.
    limits = LLParserLimits(initial_lexer_fuel=100_000, max_lexer_states=25_000, verbose_errors=False)
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds schemas that no text satisfies
    if matcher.is_error():
        raise GearbxError(f"{grammar.field}: no grammar for this schema ({one_line_of(matcher)}); {remedy}")
    return matcher


def one_line_of(matcher: Any) -> str:
    """Return a matcher's error in one line."""
    return one_line(ValueError(matcher.get_error().replace("<non-verbose/>", "")))


# Cached grammar compilers, by tokenizer.
_grammars: WeakKeyDictionary[Any, Callable[[Grammar], Any]] = WeakKeyDictionary()


def constraint_for(
    tokenizer: Any,
    response_format: ResponseFormat | None,
    thinking: bool = False,
    calls: Sequence[Any] | None = None,
) -> Constraint | None:
    """Return the logits processor for a response format or a forced tool call; None for text. It must be the last one.

    Args:
        thinking: the prompt ends within the thinking part.
        calls: tools of which one must be called, regardless of the response_format; None: none must.

    Raises:
        GearbxError: an unsupported schema, tool or tokenizer.
    """
    grammar = schema_grammar(response_format) if calls is None else call_grammar(tokenizer, calls)
    if grammar is None:
        return None
    if tokenizer not in _grammars:
        _grammars[tokenizer] = functools.lru_cache(64)(functools.partial(matcher_of, grammar_tokens(tokenizer)))
    matcher = _grammars[tokenizer](grammar).deep_copy()
    part = None
    if tokenizer.has_thinking:
        part = Thinking(tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens), thinking)
    return Constraint(matcher, frozenset(tokenizer.eos_token_ids), part, grammar.field)
