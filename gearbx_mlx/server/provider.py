"""The served models with their gears, and the bytes that each token adds to text.

`decode([token])` would drop spaces and parts of characters, so `VocabularyBytes` decodes tokens in context.
"""

import codecs
import functools
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.processors import load_processor
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

from ..compat.classes import own_tokenizer
from ..compat.templates import TemplateError
from ..decoding.governor import Governor, MemoryGuard
from ..decoding.mode import Mode, is_read_again
from ..decoding.pair import Pair, pair_cache
from ..errors import GearbxError, one_line
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..routing.gates import default_thresholds
from . import ServerSettings
from .logprobs import SYMBOLS
from .requests import DEFAULT_MODEL, Options
from .web import MAX_BODY_BYTES, Refused, RequestLimits

DEFAULT_KEEP_ALIVE = 300.0  # seconds, with --models
MIN_BODY_BYTES = 2**22  # for 128 prompts of 32 kB, or 512 tools with schemas of 8 kB


class VocabularyBytes:
    """Bytes of each token of mlx-lm's tokenizer, within text."""

    def __init__(self, tokenizer: Any):
        self._own = own_tokenizer(tokenizer)
        detokenizer = tokenizer.detokenizer
        self.is_bytewise = isinstance(detokenizer, BPEStreamingDetokenizer)
        self.is_spaced = isinstance(detokenizer, SPMStreamingDetokenizer)
        self._trims = self.is_bytewise or getattr(detokenizer, "trim_space", False)
        self.within = functools.lru_cache(2**16)(self._within)

    def first(self, token: int) -> bytes:
        """Return the bytes of a sequence's first token, without the leading space that mlx-lm trims."""
        if self.is_bytewise or self.is_spaced:
            return self.within(token).removeprefix(b" " if self._trims else b"")
        once: str = self._own.decode([token])
        return self.within(token) if "\ufffd" in once else once.encode()

    def _within(self, token: int) -> bytes:
        piece = self._own.convert_ids_to_tokens(token) if token < len(self._own) else None
        if piece is None:  # beyond the vocabulary; mlx-lm writes "!"
            return b"!" if self.is_bytewise else b""
        if not self.is_bytewise and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        if self.is_spaced:
            return str(piece).replace("▁", " ").encode()  # SentencePiece's space
        once = self._own.decode([token])
        if self.is_bytewise or ("\ufffd" in once and all(char in SYMBOLS for char in piece)):
            return b"".join(bytes([SYMBOLS[char]]) if char in SYMBOLS else char.encode() for char in piece)
        twice: str = self._own.decode([token, token])
        return twice[len(once) :].encode()


class SequenceBytes:
    """Bytes of each token of one text; joined they are the text. A character belongs to the token that completes it."""

    def __init__(self, vocabulary: VocabularyBytes):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_empty = True

    def alternative(self, token: int) -> bytes:
        """Return the bytes that a token would add."""
        return self._vocabulary.first(token) if self._is_empty else self._vocabulary.within(token)

    def add(self, token: int, is_last: bool, is_end: bool) -> tuple[str, bytes]:
        """Return the text and bytes that a token adds; an end-of-sequence token adds none."""
        added = b"" if is_end else self.alternative(token)
        text = self._decoder.decode(added, is_last)
        self._is_empty &= not added and (is_end or self._vocabulary.is_spaced)
        return text, added


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with its gears."""

    model: nn.Module
    tokenizer: Any
    config: dict
    gearbox: Gearbox | Observer | None  # None for a pair
    mode: Callable[[Options, str], Mode]  # mode of a request, by options and prompt; raises GearbxError if unavailable
    modes: tuple[str, ...]  # available in requests
    default_mode: str
    gears: tuple[str, ...]
    context: int | None  # tokens; None: unlimited
    vocabulary: int  # V, the length of the logits
    draft_model: nn.Module | None = None
    small_model: nn.Module | None = None
    controller: Governor | MemoryGuard | None = None
    close: Callable[[], None] = lambda: None  # stops the controller's sensors

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of weights and adapters, as a key of KV caches: the files behind a name may change."""
        return " ".join(model_fingerprint(model) for model in (self.model, self.small_model) if model is not None)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @functools.cached_property
    def vocabulary_bytes(self) -> VocabularyBytes:
        """Bytes of the vocabulary's tokens."""
        return VocabularyBytes(self.tokenizer)

    def make_cache(self, max_kv_size: int | None) -> list[Any]:
        """Return an empty KV cache."""
        if self.small_model is not None:
            return list(pair_cache(self.small_model, self.model, max_kv_size))
        cache = make_prompt_cache(self.model, max_kv_size)
        return cache if self.draft_model is None else cache + make_prompt_cache(self.draft_model)

    @functools.cached_property
    def processor(self) -> Any:
        """mlx-lm's processor of images, or None."""
        return load_processor(self.model, self.config)

    @functools.cached_property
    def is_batchable(self) -> bool:
        """Possibility to join its KV caches in a batch."""
        return self.draft_model is None and all(hasattr(part, "merge") for part in self.make_cache(None))

    def cache_gears(self, mode: Mode) -> list[str]:
        """Return the gears whose KV caches a mode may continue: from the top gear down to its prefill gear.

        A KV cache belongs to the lowest gear that computed any of its tokens. So mode lossless, which prefills in the
        top gear, continues no cache of a lower gear.
        """
        if self.gearbox is None or isinstance(self.gearbox, Observer):
            return [""]
        if self.controller is not None:
            return [mode.name]
        prefill_gear = mode.gears_of_text(self.gearbox)[0]
        return [gear.name for gear in self.gearbox.ladder if gear.index >= prefill_gear.index][::-1]

    def num_reusable(self, mode: Mode, prompt: int, answer: int) -> int:
        """Return how many of a sequence's tokens have KV entries of the prefill gear or a higher one.

        The next question prefills an answer of a lower gear again. The prompt's last token counts as the answer's:
        both have the same gear.
        """
        again = self.controller is None and is_read_again(mode, self.gearbox)
        return prompt - 1 if again else prompt + answer

    @property
    def bits(self) -> dict[str, int]:
        """Bits of the gears by name; empty for a pair, whose gears are models."""
        return {} if self.gearbox is None else {gear.name: gear.bits for gear in self.gearbox.ladder}

    def thresholds(self, mode: Mode) -> tuple[float, ...]:
        """Return a mode's finite thresholds in bits; empty for a mode without thresholds."""
        found: Any = (mode.threshold,) if isinstance(mode, Pair) else getattr(mode, "thresholds", ())
        if found is None:
            found = default_thresholds(len(self.gears), self.vocabulary)
        return tuple(each for each in found if each is not None and math.isfinite(each))


class GearedProvider:
    """A provider that loads models on demand and keeps one in memory.

    Args:
        prepare: checks path and adapter of a model and returns its loader. Raises GearbxError.

    Attributes:
        name: of the command line's model in answers.

    Raises:
        GearbxError: a model that cannot be loaded, a directory without checkpoints.
    """

    def __init__(
        self, settings: ServerSettings, prepare: Callable[[str | None, str | None], Callable[[], ServedModel]]
    ):
        self.settings, self.listen = settings, settings.listen
        model = settings.model.model
        if model is not None and Path(model).exists():
            model = str(Path(model))  # without a slash at its end, as in the catalog
        self.own_key = model, settings.model.adapter_path
        self.name = model or "demo"
        self.created = int(time.time())
        self.prepare = prepare
        self.served: ServedModel | None = None
        self.model_key: tuple[str | None, str | None] | None = None
        if self.has_own:
            self.load_key(self.own_key)
        elif not self.catalog:
            why = f"--models {self.listen.models}: no subdirectory has a config.json"
            raise GearbxError(f"{why}; use a directory of checkpoints")

    @property
    def catalog(self) -> dict[str, tuple[str | None, str | None]]:
        """Path and adapter of each named model; the directory of checkpoints is listed anew each time."""
        models = self.listen.models
        configs = sorted(Path(models).glob("*/config.json")) if models is not None else []
        own = {self.name: self.own_key} if self.has_own else {}
        return own | {config.parent.name: (str(config.parent), None) for config in configs}

    @property
    def has_own(self) -> bool:
        """Existence of a default model, for requests without a name."""
        return self.listen.models is None or self.own_key[0] is not None

    @property
    def keep_alive(self) -> float:
        """Seconds after the last answer until the model is unloaded."""
        default = math.inf if self.listen.models is None else DEFAULT_KEEP_ALIVE
        return default if self.listen.keep_alive is None else self.listen.keep_alive

    def limits(self) -> RequestLimits:
        """Return limits that fit the context, and either many short prompts or images."""
        served = self.served
        if served is None or served.context is None or self.listen.allow_models or self.listen.models is not None:
            return RequestLimits()
        text = served.context * served.longest_token
        body = MAX_BODY_BYTES if served.processor is not None else min(max(text, MIN_BODY_BYTES), MAX_BODY_BYTES)
        return RequestLimits(body, max(RequestLimits().values, 2 * served.context))

    @property
    def names(self) -> set[str]:
        """Names of the server's own model in requests."""
        names = {DEFAULT_MODEL, self.name}
        path = Path(self.name)
        if path.exists():
            names |= {str(path.resolve()), path.resolve().name}
        return names

    def key_of(self, model: str | None, adapters: str | None) -> tuple[str | None, str | None]:
        """Return path and adapter of a requested model. Raises Refused for one that is not served."""
        own, catalog = not model or model in self.names, self.catalog
        if model in catalog and adapters is None:
            return catalog[model]
        if own and not self.has_own:
            raise Refused(400, f"model: missing; choose from {', '.join(catalog)}", param="model")
        if own and adapters in (None, self.own_key[1]):
            return self.own_key
        if not self.listen.allow_models:
            field, value = ("adapters", adapters) if own and adapters else ("model", model)
            why = f"{field}: not served here, got {str(value)[:200]!a}; choose from {', '.join(catalog)}"
            raise Refused(404, why, param="model", code="model_not_found")
        return (self.own_key[0] if own else model), adapters

    def name_of(self, key: tuple[str | None, str | None]) -> str:
        """Return a model's name in answers."""
        return next((name for name, (path, _) in self.catalog.items() if path == key[0]), self.name)

    def current(self, key: tuple[str | None, str | None]) -> ServedModel | None:
        """Return the model if it is loaded."""
        return self.served if self.model_key == key else None

    def load_key(self, key: tuple[str | None, str | None]) -> ServedModel:
        """Return the model, after loading it in place of the present one. Raises GearbxError."""
        if self.current(key) is None:
            load = self.prepare(*key)  # an error here leaves the present model loaded
            self.unload()
            self.take(key, load())
        assert self.served is not None
        return self.served

    def unload(self) -> None:
        """Free the loaded model."""
        if self.served is not None:
            self.served.close()
        self.model_key, self.served = None, None
        collect_and_freeze()
        mx.clear_cache()

    def take(self, key: tuple[str | None, str | None], served: ServedModel) -> None:
        """Make a loaded model the present one. Raises GearbxError for an invalid --chat-template."""
        if self.settings.answers.chat_template:
            try:
                served.tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
            except TemplateError as error:
                served.close()
                raise GearbxError(f"--chat-template: not a template ({one_line(error)}); use a valid one") from error
        self.model_key, self.served = key, served
        collect_and_freeze()


def collect_and_freeze() -> None:
    """Collect garbage, and exempt the remaining objects from later collections.

    A request with many small values triggers collections. Each would scan all objects of the process, and all threads
    would wait.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
