"""The models that a server serves, each with its gears, in the place of mlx-lm's own provider.

`Spelling` says what each token adds to a text, as characters and bytes: `decode([token])` drops spaces and parts of
characters.
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
from mlx_lm.server import ModelProvider
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

from ..compat.classes import own_tokenizer
from ..compat.templates import TemplateError
from ..decoding.governor import Governor, MemoryGuard
from ..decoding.mode import Mode, is_read_again
from ..decoding.pair import Pair, pair_cache
from ..errors import GearbxError, one_line
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..routing.gates import default_thresholds
from .logprobs import SYMBOLS
from .requests import DEFAULT_MODEL, Options
from .web import LARGEST_BODY, Refused, RequestLimits

MIN_ROOM = 2**22  # bytes: 128 texts, or 512 tools with their schemas, of 32 and 8 kB


class Vocabulary:
    """The tokens of the vocabulary of mlx-lm's tokenizer as bytes, in the midst of a text."""

    def __init__(self, tokenizer: Any):
        self._own = own_tokenizer(tokenizer)
        detokenizer = tokenizer.detokenizer
        self.is_bytewise = isinstance(detokenizer, BPEStreamingDetokenizer)
        self.is_spaced = isinstance(detokenizer, SPMStreamingDetokenizer)
        self._trims = self.is_bytewise or getattr(detokenizer, "trim_space", False)
        self.spelled = functools.lru_cache(2**16)(self._spelled)

    def first(self, token: int) -> bytes:
        """Return what a token adds to an empty text: mlx-lm takes the space away with which that begins."""
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
            return str(piece).replace("▁", " ").encode()  # SentencePiece's space
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
        """Return what a token would add."""
        return self._vocabulary.first(token) if self._is_empty else self._vocabulary.spelled(token)

    def add(self, token: int, last: bool, is_end: bool) -> tuple[str, bytes]:
        """Return what a token adds: nothing where it is the mark of the end."""
        added = b"" if is_end else self.alternative(token)
        text = self._decoder.decode(added, last)
        self._is_empty &= not added and (is_end or self._vocabulary.is_spaced)
        return text, added


@dataclass(frozen=True)
class Served:
    """A model that is served.

    gearbox: None for a pair. mode: makes the mode of a request from its options and its prompt; raises GearbxError for
    options that the server was not started for. modes: that may be asked for. context: tokens, if the model has an
    end. vocabulary: V, the length of the logits. close: ends what watches the machine for it.
    """

    model: nn.Module
    tokenizer: Any
    config: dict
    gearbox: Gearbox | Observer | None
    mode: Callable[[Options, str], Mode]
    modes: tuple[str, ...]
    default_mode: str
    gears: tuple[str, ...]
    context: int | None
    vocabulary: int
    draft_model: nn.Module | None = None
    small_model: nn.Module | None = None
    controller: Governor | MemoryGuard | None = None
    close: Callable[[], None] = lambda: None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the weights and adapters, to which KV caches belong: files of a name may be replaced."""
        return " ".join(model_fingerprint(model) for model in (self.model, self.small_model) if model is not None)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @functools.cached_property
    def spelled(self) -> Vocabulary:
        """The tokens of the vocabulary as bytes."""
        return Vocabulary(self.tokenizer)

    def make_cache(self, max_kv_size: int | None) -> list[Any]:
        """Return a KV cache for a new text."""
        if self.small_model is not None:
            return list(pair_cache(self.small_model, self.model, max_kv_size))
        cache = make_prompt_cache(self.model, max_kv_size)
        return cache if self.draft_model is None else cache + make_prompt_cache(self.draft_model)

    def keys(self, mode: Mode) -> list[str]:
        """Return the KV caches that a text may go on from, each kind named by the lowest gear that read any of its
        tokens.

        They are those of the gear that reads prompts, which comes last, and of all gears above it, the top gear first.
        So mode lossless, whose prompts the top gear reads, takes nothing that another gear read.
        """
        if self.gearbox is None or isinstance(self.gearbox, Observer):
            return [""]
        if self.controller is not None:
            return [mode.name]
        reads = mode.gears_of_text(self.gearbox)[0]
        return [gear.name for gear in self.gearbox.ladder if gear.index >= reads.index][::-1]

    def kept(self, mode: Mode, prompt: int, answer: int) -> int:
        """Return how many tokens of a text, from the first on, have entries of the gear of prompts, or of a higher one.

        So an answer in a lower gear is read again in that of prompts, with the next question. The last token of a
        prompt is computed as the answer is.
        """
        again = self.controller is None and is_read_again(mode, self.gearbox)
        return prompt - 1 if again else prompt + answer

    @property
    def bits(self) -> dict[str, int]:
        """Bits of the gears, by name; empty for a pair, whose gears are models."""
        return {} if self.gearbox is None else {gear.name: gear.bits for gear in self.gearbox.ladder}

    def thresholds(self, mode: Mode) -> tuple[float, ...]:
        """Return the finite thresholds between the gears of a mode, bits; empty where the mode has none."""
        if isinstance(mode, Pair):
            found: Any = (mode.threshold,)
        else:
            found = getattr(mode, "thresholds", ())
        if found is None:
            found = default_thresholds(len(self.gears), self.vocabulary)
        return tuple(each for each in found if each is not None and math.isfinite(each))


@dataclass(frozen=True)
class ServingSettings:
    """What requests get that do not say it themselves, and how much is done at once.

    mlx-lm's server reads these fields too, so they have the names of its flags. pipeline: of ranks, which do not serve.
    """

    model: str | None
    adapter_path: str | None
    trust_remote_code: bool
    chat_template: str
    chat_template_args: dict[str, Any]
    max_tokens: int
    temp: float
    top_p: float
    top_k: int
    min_p: float
    decode_concurrency: int
    prompt_concurrency: int
    batch_policy: str
    prompt_cache_bytes: int | None
    max_kv_size: int | None
    prefill_step_size: int
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    kv_gears: tuple[int, ...] | None
    draft_model: str | None
    pipeline: bool = False


class GearedProvider(ModelProvider):
    """Loads what is served, on demand, and keeps one model.

    Args:
        name: of the model that the server was started with; None: the demo model.
        prepare: finds a model by its path and adapter and returns what loads it; raises GearbxError if there is none.
        allow_models: whether requests may name other models, and adapters.
        models: a directory whose checkpoints requests may name; then none is loaded at first, unless one is named.
        keep_alive: seconds after the last answer in which a model stays in memory.

    Raises:
        GearbxError: a model that cannot be loaded, a directory without checkpoints.
    """

    def __init__(
        self,
        settings: ServingSettings,
        name: str | None,
        prepare: Callable[[str | None, str | None], Callable[[], Served]],
        allow_models: bool = False,
        models: str | None = None,
        keep_alive: float = math.inf,
    ):
        super().__init__(settings)
        self.settings = settings
        self.name = name or "demo"
        self.created = int(time.time())
        self.prepare, self.allow_models = prepare, allow_models
        self.own_key = (name, settings.adapter_path)
        self.models, self.keep_alive = models, keep_alive
        self.served: Served | None = None
        if models is None or name is not None:
            self.load_key(self.own_key)
        elif not self.catalogue:
            raise GearbxError(f"--models {models}: no folder in it has a config.json; give one that has checkpoints")

    @property
    def catalogue(self) -> dict[str, tuple[str | None, str | None]]:
        """The models that requests may name: path and adapter of each.

        Those of the directory of models are looked up again each time: they come and go.
        """
        configs = sorted(Path(self.models).glob("*/config.json")) if self.models is not None else []
        own = {self.name: self.own_key} if self.has_own else {}
        return own | {config.parent.name: (str(config.parent), None) for config in configs}

    @property
    def has_own(self) -> bool:
        """True if there is a model for requests that name none."""
        return self.models is None or self.own_key[0] is not None

    def limits(self) -> RequestLimits:
        """Return how large a request may be: as a context needs, with room for many short texts, or for images."""
        served = self.served
        if served is None or served.context is None or self.allow_models or self.models is not None:
            return RequestLimits()
        text = served.context * served.longest_token
        body = LARGEST_BODY if self.processor is not None else min(max(text, MIN_ROOM), LARGEST_BODY)
        return RequestLimits(body, max(RequestLimits().values, 2 * served.context))

    @property
    def names(self) -> set[str]:
        """What requests may call the server's own model."""
        names = {DEFAULT_MODEL, self.name}
        path = Path(self.name)
        if path.exists():
            names |= {str(path.resolve()), path.resolve().name}
        return names

    def key_of(self, model: str | None, adapters: str | None) -> tuple[str | None, str | None]:
        """Return path and adapter of the model that a request names. Raises Refused for those that are not served."""
        own, catalogue = not model or model in self.names, self.catalogue
        if model in catalogue and adapters is None:
            return catalogue[model]
        if own and not self.has_own:
            raise Refused(400, f"name a model; {', '.join(catalogue)} are served here", param="model")
        if own and adapters in (None, self.own_key[1]):
            return self.own_key
        if not self.allow_models:
            what = f"the adapter {adapters[:200]!a}" if own and adapters else f"the model {str(model)[:200]!a}"
            why = f"{what} is not served here; {', '.join(catalogue)} is"
            raise Refused(404, why, param="model", code="model_not_found")
        return (self.own_key[0] if own else model), adapters

    def name_of(self, key: tuple[str | None, str | None]) -> str:
        """Return the name of a model as answers have it."""
        return next((name for name, (path, _) in self.catalogue.items() if path == key[0]), self.name)

    def current(self, key: tuple[str | None, str | None]) -> Served | None:
        """Return the model, if it is the one that is loaded."""
        return self.served if self.model_key == key else None

    def load_key(self, key: tuple[str | None, str | None]) -> Served:
        """Return the model, loaded in place of the one before. Raises GearbxError as the command that opens a model."""
        if self.current(key) is None:
            load = self.prepare(*key)  # which may fail, and then the model before stays
            self.forget()
            self.take(key, load())
        assert self.served is not None
        return self.served

    def forget(self) -> None:
        """Give up the loaded model and its memory."""
        if self.served is not None:
            self.served.close()
        self.reset()
        self.served = None
        collect_and_freeze()
        mx.clear_cache()

    def take(self, key: tuple[str | None, str | None], served: Served) -> None:
        """Raises GearbxError for a --chat-template that is not a template."""
        if self.settings.chat_template:
            try:
                served.tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
            except TemplateError as error:
                served.close()
                raise GearbxError(f"--chat-template is not a template: {one_line(error)}; mend it") from error
        self.model_key, self.served = key, served
        self.model, self.tokenizer = served.model, served.tokenizer
        self.draft_model = served.draft_model
        self.processor = load_processor(served.model, served.config)
        self.is_batchable = served.draft_model is None and all(
            hasattr(part, "merge") for part in served.make_cache(None)
        )
        collect_and_freeze()


def collect_and_freeze() -> None:
    """Free what is not used any more, and keep Python's later collections from the rest.

    A request of many small values starts collections. Each looks at all objects of the program, and nothing else runs
    meanwhile.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
