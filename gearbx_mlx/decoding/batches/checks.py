"""What callers can get wrong about the sequences of a batch, found before any of them is added."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator as MlxBatchGenerator
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ...errors import GearbxError
from ...files.model_directory import context_length
from ...gears.ladder import Gear, Ladder
from ...ranks.agreement import agreement_of
from ..caches import parts
from ..prompt import check_known


@dataclass(frozen=True)
class Sequences:
    """Arguments of `insert_segments`: lists of one entry for each sequence, or None."""

    segments: Sequence[Sequence[Sequence[int]]]
    max_tokens: Sequence[int] | None
    caches: Sequence[Any] | None
    all_tokens: Sequence[Sequence[int]] | None
    samplers: Sequence[Any] | None
    logits_processors: Sequence[Any] | None
    stop_sequences: Sequence[Any] | None
    seeds: Sequence[int | None] | None
    modes: Sequence[Any] | None

    def check(self, model: nn.Module, vocabulary: int) -> None:
        """Raises GearbxError for lists of unlike length, and for what a sequence of this model cannot have."""
        check_lengths(len(self.segments), {field.name: getattr(self, field.name) for field in fields(self)[1:]})
        context = context_length(vars(model.args)) if hasattr(model, "args") else None
        layers = len(make_prompt_cache(model)) if self.caches else 0
        for place, prompt in enumerate(self.segments):
            tokens = [token for part in prompt for token in part]
            begun = len(self.all_tokens[place]) if self.all_tokens else 0
            check_prompt(f"prompts[{place}]", tokens, begun, context, vocabulary)
            if self.max_tokens is not None and not is_whole(self.max_tokens[place], 1):
                raise GearbxError(f"max_tokens of prompts[{place}] is {self.max_tokens[place]!r}; give 1 or more")
            if self.seeds is not None and self.seeds[place] is not None and not is_whole(self.seeds[place], 0):
                raise GearbxError(f"seeds[{place}] is {self.seeds[place]!r}; give a whole number from 0, or None")
            if self.caches is not None and self.caches[place] is not None:
                check_cache(f"prompt_caches[{place}]", self.caches[place], layers)
            if self.logits_processors is not None:
                check_processors(f"logits_processors[{place}]", self.logits_processors[place])


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number, this one or a larger one."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_prompt(name: str, tokens: Sequence[int], begun: int, context: int | None, vocabulary: int) -> None:
    """Raises GearbxError for a prompt that is empty, or beyond the context with the tokens before it, or that has a
    token that the model does not know."""
    if not tokens:
        raise GearbxError(f"{name} is empty; give one token or more")
    if context is not None and begun + len(tokens) >= context:
        raise GearbxError(f"{name} has {begun + len(tokens)} tokens, and the model's context {context}; shorten it")
    check_known(name, tokens, vocabulary)


def check_cache(name: str, cache: Sequence[Any], layers: int) -> None:
    """Raises GearbxError for a sequence's KV cache that has another number of layers, or cannot join others."""
    if len(cache) != layers:
        raise GearbxError(f"{name} has {len(cache)} layers, and the model {layers}; make it with this model")
    for part in cache:
        if not hasattr(part, "merge"):
            raise GearbxError(
                f"{name} has a {type(part).__name__}, which several texts cannot share; write it alone, with "
                "stream_generate"
            )


def check_processors(name: str, processors: Any) -> None:
    """Raises GearbxError for what is no list of logits processors, and not None."""
    if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
        raise GearbxError(f"{name} is {processors!r}; give a list of functions, or None")


SIZES = ("max_tokens", "completion_batch_size", "prefill_batch_size", "prefill_step_size", "max_kv_size")
SETTINGS = frozenset(inspect.signature(MlxBatchGenerator.__init__).parameters) - {"self", "model"}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises GearbxError for keywords that mlx-lm's BatchGenerator does not have, and for sizes below 1."""
    for name, value in settings.items():
        if name.startswith("kv_"):
            raise GearbxError(f"{name} is for one text at a time; leave it out, or use stream_generate for each text")
        if name not in SETTINGS:
            raise GearbxError(f"a batch has no {name}; choose from {', '.join(sorted(SETTINGS))}")
        if name in SIZES and not is_whole(value, 1) and not (name == "max_kv_size" and value is None):
            raise GearbxError(f"{name} is {value!r}; give 1 or more")


def check_one_process(model: nn.Module) -> None:
    """Raises GearbxError where ranks share a model: nothing makes their batches alike."""
    if agreement_of(model).group is not None:
        raise GearbxError("ranks share this model, and they write one text at a time; use stream_generate for each")


def gear_of(chosen: Any, ladder: Ladder) -> Gear:
    """The gear that a batch's policy has chosen. Raises GearbxError for what is none."""
    if not is_whole(chosen, 0) or chosen >= len(ladder):
        raise GearbxError(f"the batch policy chose gear {chosen!r}; a policy returns 0 to {len(ladder) - 1}")
    return ladder[int(chosen)]


def check_lengths(prompts: int, lists: dict[str, Sequence[Any] | None]) -> None:
    """Raises GearbxError for a list that has another length than there are prompts."""
    for name, given in lists.items():
        if given is not None and len(given) != prompts:
            raise GearbxError(f"{name} has {len(given)} entries for {prompts} prompts; give one for each")


def check_mergeable(model: nn.Module) -> None:
    """Raises GearbxError for a model whose KV caches several texts cannot share."""
    for part in make_prompt_cache(model):
        if not hasattr(part, "merge"):
            raise GearbxError(
                f"the model's {type(part).__name__} cannot be shared by several texts; write them one at a time"
            )


def has_states(model: nn.Module) -> bool:
    """Whether layers of the model are recurrent, and have a state in place of keys and values."""
    return any(isinstance(part, ArraysCache) for part in parts(make_prompt_cache(model)))
