"""Prompt caches in files: KV caches of processed text, for a later run to continue."""

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from ..decoding.caches import KeptCache, check_prompt_cache, plain_cache
from ..decoding.mode import Mode
from ..errors import GearbxError, GearbxWarning, error_context, one_line
from ..files.reading import parse_json, typed
from ..files.writing import replacing_arrays
from ..gears.gearbox import Gearbox, Observer, model_fingerprint

CONVERSATION, FINGERPRINT = "conversation", "fingerprint"  # keys of the metadata


@dataclass(frozen=True)
class SavedConversation:
    """A conversation to continue.

    Attributes:
        before: its text up to the next message.
        templated: True if a chat template made it.
        tokens: tokens in the cache.
        bits: of the lowest gear that computed any of them; 0 if unknown.
    """

    before: str
    templated: bool
    tokens: list[int]
    bits: int = 0


@dataclass(frozen=True)
class PromptCache:
    """The KV caches of a model's layers, from a file.

    Attributes:
        conversation: None if no chat saved the file.
        fingerprint: of the model with its adapters; "" if no chat saved the file.
    """

    file: str
    model: str
    entries: list[Any]
    conversation: SavedConversation | None
    fingerprint: str

    def before(self, templated: bool) -> str:
        """Return the text before the message, in the place of the template's; "" if only the cache is known."""
        return (
            self.conversation.before
            if self.conversation is not None and self.conversation.templated == templated
            else ""
        )

    def check_weights(self, model: nn.Module) -> None:
        """Validate that the model has the weights and adapters that made the cache, whatever its name."""
        found = model_fingerprint(model)
        if self.fingerprint not in ("", found):
            raise GearbxError(
                f"{self.file}: made with weights and adapters {self.fingerprint[:8]}, got {found[:8]} in {self.model}; "
                "use those weights, or pass the prompt again"
            )

    def check_gear(self, mode: Mode, gearbox: Gearbox | Observer) -> None:
        """Warn if the prefill gear is not the gear that computed the cache. The cache is used unchanged."""
        cached = 0 if self.conversation is None else self.conversation.bits
        if cached and isinstance(gearbox, Gearbox):
            bits = mode.gears_of_text(gearbox)[0].bits
            if bits != cached:
                warning = (
                    f"{self.file}: computed in {cached} bits, and the prefill gear has {bits}; it is used unchanged"
                )
                warnings.warn(warning, GearbxWarning, stacklevel=2)

    def unread(
        self, model: nn.Module, tokens: list[int], max_kv_size: int | None, before: str
    ) -> tuple[list[int], list[Any]]:
        """Return the tokens that the cache lacks, and the caches to continue with them.

        Args:
            max_kv_size: of new caches; they replace recurrent states that cannot be cut.
            before: the text at the start of the tokens; "" if the tokens follow the cache.

        Raises:
            GearbxError: the cache does not fit the model.
        """
        with error_context(self.file):
            check_prompt_cache(self.entries, model)
        if not before or self.conversation is None:
            return tokens, self.entries
        kept = KeptCache(lambda: make_prompt_cache(model, max_kv_size))
        kept.entries, kept.tokens = self.entries, self.conversation.tokens
        kept.bits = [self.conversation.bits] * len(kept.tokens)
        return kept.unread(tokens), kept.entries


def save_cache(path: Path, entries: list[Any], name: str, model: nn.Module, conversation: SavedConversation) -> None:
    """Write the cache of a chat. name: the model's."""
    metadata = {"model": name, "tokenizer_config": "{}", FINGERPRINT: model_fingerprint(model)}
    metadata[CONVERSATION] = msgspec.json.encode(asdict(conversation)).decode()
    with replacing_arrays(path) as place:
        save_prompt_cache(place, plain_cache(entries), metadata)


def load_cache(file: str | None, model: str | None) -> PromptCache | None:
    """Return a prompt cache; None without a file.

    Raises:
        GearbxError: not a prompt cache, or a different model's cache.
    """
    if file is None:
        return None
    try:
        entries, metadata = load_prompt_cache(file, return_metadata=True)
        mx.eval([part.state for part in entries])  # reads the values; this fails for a truncated file
        made_with = metadata["model"]
        text = metadata.get(CONVERSATION)
        conversation = None if text is None else typed(parse_json(text), SavedConversation)
    except Exception as error:  # other kinds of files fail in any way
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); use a file from mlx_lm.cache_prompt"
        ) from error
    if model not in (None, made_with):
        raise GearbxError(f"{file}: made with the model {made_with}, got {model}; use --model {made_with}")
    return PromptCache(file, made_with, entries, conversation, metadata.get(FINGERPRINT, ""))
