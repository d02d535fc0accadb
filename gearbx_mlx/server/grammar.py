"""Answers that fit a schema, or call a tool: a grammar says which tokens may come next (llguidance), in any mode.

A `Constraint` is a logits processor of mlx-lm. Mode lossless calls processors for drafts and then for what was
verified, so a constraint is a function of the tokens that it is called with: it goes back to where they agree with
those of the call before.

To know which tokens may follow, the token before has to be known. So mlx-lm cannot run ahead of a constraint.
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

LARGEST_SCHEMA = 2**16  # bytes, as compact JSON
WHITESPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,20}"  # as llama.cpp has it: given more, a weak model writes nothing else
FORMAT, CHOICE = "response_format", "tool_choice"
BIAS = np.array([-np.inf, 0], np.float32)  # of a token that may not come next, and of one that may


def mask_of(tokens: Iterable[int], size: int) -> np.ndarray:
    """Return the mask (size,) of these tokens: for each token of a vocabulary whether it is one of them."""
    return np.isin(np.arange(size), [*tokens])


def allow(logits: mx.array, mask: np.ndarray) -> mx.array:
    """Logits (1, V), minus infinity where a token is not in the mask; tokens beyond its end are not.

    Numpy looks the biases up: on a CPU, MLX takes three times as long to select.
    """
    size = logits.shape[-1]
    fitting = mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))
    return logits + mx.array(BIAS.take(fitting)).astype(logits.dtype)


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
        """Return how many of a text's first tokens (n,) are the thinking part, 0 without one; None while it goes on."""
        if not self.opened and not (len(text) and text[0] == self.start[0]):
            return 0
        size = len(self.end)
        places = np.flatnonzero(text == self.end[0])
        return next((int(p) + size for p in places if tuple(text[p : p + size].tolist()) == self.end), None)


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


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """What an answer has to be. field: of the request. text: a JSON schema, or a Lark grammar of calls."""

    field: str
    text: str


def schema_form(response_format: ResponseFormat | None) -> AnswerForm | None:
    """Return the schema that an answer has to fit; None for text. Raises GearbxError as `checked_schema`."""
    if response_format is None or isinstance(response_format, Text):
        return None
    if isinstance(response_format, JsonObject):
        return AnswerForm(FORMAT, '{"type":"object"}')
    return AnswerForm(FORMAT, checked_schema(FORMAT, response_format.json_schema.schema))


def checked_schema(field: str, schema: Any) -> str:
    """Return a schema as compact JSON. Raises GearbxError for one that is too large or nested too deeply."""
    try:
        check_depth(schema)
    except GearbxError as error:
        raise GearbxError(f"{field}: the schema is {error}; give a flatter one") from error
    text = msgspec.json.encode(schema)
    if len(text) > LARGEST_SCHEMA:
        size = f"{len(text)} bytes, and at most {LARGEST_SCHEMA} are read"
        raise GearbxError(f"{field}: the schema has {size}; give a smaller one")
    return text.decode()


def function_name(tool: dict[str, Any]) -> Any:
    """Return what OpenAI's object of a tool names; None where it is none."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def call_form(tokenizer: Any, tools: Sequence[Any]) -> AnswerForm:
    """Return a call of one of OpenAI's tools, as the model writes calls; its arguments fit the tool's schema.

    Raises GearbxError for tools without a name, or a model without a way to call in which arguments are JSON.
    """
    calls = []
    for tool in tools:
        name = function_name(tool)
        if not isinstance(name, str) or not name:
            raise GearbxError(f"{CHOICE}: a tool has no function.name")
        before, after = spelling_of_calls(tokenizer, name, tools)
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, dict):
            parameters = {"type": "object"}
        schema = checked_schema(CHOICE, parameters | {"x-guidance": {"whitespace_pattern": WHITESPACE}})
        calls.append(f"{json.dumps(before)} %json {schema} {json.dumps(after)}")
    marks = [mark_of(tokenizer, mark) for mark in (tokenizer.tool_call_start, tokenizer.tool_call_end)]
    return AnswerForm(CHOICE, f"start: {marks[0]} call {marks[1]}\ncall: " + "\n    | ".join(calls))


def spelling_of_calls(tokenizer: Any, name: str, tools: Sequence[Any]) -> tuple[str, str]:
    """Return what a model writes before and after the arguments of a call: what its own parser reads as that call."""
    ways = (f'\n{{"name": {json.dumps(name)}, "arguments": ', "}\n"), (f"{name}[ARGS]", "")
    for before, after in ways if tokenizer.tool_parser is not None else ():
        with contextlib.suppress(Exception):  # a parser raises what it likes
            call = tokenizer.tool_parser(f"{before}{{}}{after}", tools)
            call = call[0] if isinstance(call, list) else call
            if call["name"] == name and call["arguments"] in ({}, "{}"):
                return before, after
    raise GearbxError(f"{CHOICE}: nothing makes this model call a tool; leave it out, or give auto")


def mark_of(tokenizer: Any, mark: str | None) -> str:
    """Return a mark of calls in a Lark grammar: its text, or the token that no text is."""
    own = own_tokenizer(tokenizer)
    number = own.convert_tokens_to_ids(mark) if mark else None
    added = own.added_tokens_decoder.get(number)
    return f"<[{number}]>" if added is not None and added.special else json.dumps(mark or "")


class Constraint:
    """A logits processor that leaves the tokens by which a text goes on in its grammar.

    The end of the text is among them where the grammar is complete. It serves one text: the tokens of its first call
    are the prompt, or what of it was not cached.

    Args:
        matcher: of the grammar, at its beginning; of this constraint alone.
        ends: tokens that end a text.
        thinking: the part of the text before the grammar begins.
        field: of the request that asks for the grammar.

    `error` says why the text could not be finished, such as a grammar that asks for too much time; else it is None. The
    text then ends: to raise would end the other texts of its batch.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], thinking: Thinking | None = None, field: str = FORMAT):
        self.error: str | None = None
        self.field = field
        self._matcher, self._thinking = matcher, thinking
        self._first: int | None = None  # token of the text, after the prompt
        self._matched = np.zeros(0, np.int64)
        self._ends = ends
        size = len(matcher.compute_logit_bias())
        self._only_ends = mask_of(ends, size)
        self._starts = mask_of(thinking.start[:1] if thinking is not None else (), size)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits (1, V), minus infinity for what may not come after the tokens (n,) of prompt and text."""
        mx.async_eval(logits)  # the device computes them while the mask is made
        known = np.array(tokens, copy=False)
        if self._first is None:
            self._first = len(known)
        return allow(logits, self._allowed(known[self._first :]))

    def _allowed(self, text: np.ndarray) -> np.ndarray:
        """Return the mask of the tokens that may follow a text without its prompt."""
        if self._thinking is None:
            return self._in_grammar(text)
        begins = self._thinking.over(text)
        if begins is None:
            return ~self._only_ends
        mask = self._in_grammar(text[begins:])
        return mask if self._thinking.opened or len(text) else mask | self._starts

    def _in_grammar(self, text: np.ndarray) -> np.ndarray:
        """Return the mask of the tokens that may follow a text of the grammar."""
        if len(text) and int(text[-1]) in self._ends:  # mlx-lm asks for one token more
            return self._only_ends
        common = in_common(self._matched, text)
        if common < len(self._matched):
            self._matcher.rollback(len(self._matched) - common)
        taken = common + self._matcher.try_consume_tokens(text[common:].tolist())
        self._matched = text[:taken].astype(np.int64)
        if self._matcher.is_error():
            return self._ended(f"{one_line_of(self._matcher)}; give a smaller schema")
        if taken < len(text):
            return self._ended("another logits processor chose a token that does not fit")
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        return self._ended(one_line_of(self._matcher)) if self._matcher.is_error() else mask

    def _ended(self, why: str) -> np.ndarray:
        self.error = f"{self.field}: the answer cannot be finished ({why})"
        return self._only_ends


def grammar_tokens(tokenizer: Any) -> Any:
    """Return llguidance's view of a tokenizer, which takes about a second. Raises GearbxError if it cannot read it."""
    try:
        return from_tokenizer(own_tokenizer(tokenizer), eos_token=sorted(tokenizer.eos_token_ids))
    except Exception as error:
        raise GearbxError(
            f"the model's tokenizer can keep no response_format and no tool_choice ({one_line(error)}); leave it out"
        ) from error


def matcher_of(tokens: Any, form: AnswerForm) -> Any:
    """Return a matcher at the beginning of a grammar. tokens: of `grammar_tokens`.

    Raises GearbxError for a schema that cannot be kept, or asks for too much time or memory.
    """
    remedy = "give another schema"
    try:
        if form.field == CHOICE:
            grammar = LLMatcher.grammar_from_lark(form.text)
        else:
            grammar = LLMatcher.grammar_from_json_schema(form.text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GearbxError(f"{form.field}: the schema cannot be read ({one_line(error)}); {remedy}") from error
    # llguidance's own limits allow seconds for a schema, and half a gigabyte.
    limits = LLParserLimits(initial_lexer_fuel=100_000, max_lexer_states=25_000, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what no text can fit is found here
    if matcher.is_error():
        raise GearbxError(f"{form.field}: no grammar for this schema ({one_line_of(matcher)}); {remedy}")
    return matcher


def one_line_of(matcher: Any) -> str:
    """Return what a matcher says of its error, in one line."""
    return one_line(ValueError(matcher.get_error().replace("<non-verbose/>", "")))


# By tokenizers: what compiles their grammars, each once.
_grammars: WeakKeyDictionary[Any, Callable[[AnswerForm], Any]] = WeakKeyDictionary()


def constraint_for(
    tokenizer: Any,
    response_format: ResponseFormat | None,
    thinking: bool = False,
    calls: Sequence[Any] | None = None,
) -> Constraint | None:
    """Return the last logits processor of an answer that has to fit a format or to call a tool; None for plain text.

    Args:
        tokenizer: of mlx-lm.
        thinking: the prompt ends within the thinking part. Where a model begins to think by itself is seen.
        calls: the tools, one of which has to be called, whatever the response_format; None: none has to.

    Raises:
        GearbxError: the schema cannot be kept, no tool can be called, or llguidance cannot read the tokenizer.
    """
    form = schema_form(response_format) if calls is None else call_form(tokenizer, calls)
    if form is None:
        return None
    if tokenizer not in _grammars:
        _grammars[tokenizer] = functools.lru_cache(64)(functools.partial(matcher_of, grammar_tokens(tokenizer)))
    matcher = _grammars[tokenizer](form).deep_copy()
    thinks = None
    if tokenizer.has_thinking:
        thinks = Thinking(tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens), thinking)
    return Constraint(matcher, frozenset(tokenizer.eos_token_ids), thinks, form.field)
