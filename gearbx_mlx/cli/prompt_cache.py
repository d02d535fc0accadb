"""Prompt caches in files: the keys and values of a text that was read, which a later run continues."""

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

CONVERSATION, FINGERPRINT = "conversation", "fingerprint"  # where they are in the metadata


@dataclass(frozen=True)
class BegunConversation:
    """A conversation that goes on.

    before: its text up to where the next message begins. templated: a chat template made it.
    tokens: those in the cache. bits: of the lowest gear that computed any of them; 0: not known.
    """

    before: str
    templated: bool
    tokens: list[int]
    bits: int = 0


@dataclass(frozen=True)
class PromptCache:
    """The caches of a model's layers, as a file has them.

    fingerprint: of the model that read the text, with its adapters; "" and `begun` None where no chat saved the file.
    """

    file: str
    model: str
    entries: list[Any]
    begun: BegunConversation | None
    fingerprint: str

    def before(self, templated: bool) -> str:
        """Return what stands before the message in the template's place; "" where the cache is all that is
        known of it."""
        return self.begun.before if self.begun is not None and self.begun.templated == templated else ""

    def check_weights(self, model: nn.Module) -> None:
        """Raises GearbxError where other weights or adapters read the text than the model has, whatever its name."""
        found = model_fingerprint(model)
        if self.fingerprint not in ("", found):
            raise GearbxError(
                f"{self.file}: made with the weights and adapters {self.fingerprint[:8]}, and {self.model} has "
                f"{found[:8]} now; give the prompt again, or those weights"
            )

    def check_gear(self, mode: Mode, gearbox: Gearbox | Observer) -> None:
        """Warn where another gear computed the entries than reads prompts now: they are used as they are."""
        made = 0 if self.begun is None else self.begun.bits
        if made and isinstance(gearbox, Gearbox):
            bits = mode.gears_of_text(gearbox)[0].bits
            if bits != made:
                said = f"{self.file}: was read in {made} bits, and prompts are read in {bits} here; it is used as it is"
                warnings.warn(said, GearbxWarning, stacklevel=2)

    def unread(
        self, model: nn.Module, tokens: list[int], max_kv_size: int | None, before: str
    ) -> tuple[list[int], list[Any]]:
        """Return the tokens that the cache does not have, and the caches that go on with them.

        Args:
            max_kv_size: of caches that are made again, as where states cannot be cut to what the tokens begin with.
            before: what the tokens begin with; "": they follow the cache.

        Raises:
            GearbxError: the cache does not suit the model.
        """
        with error_context(self.file):
            check_prompt_cache(self.entries, model)
        if not before or self.begun is None:
            return tokens, self.entries
        kept = KeptCache(lambda: make_prompt_cache(model, max_kv_size))
        kept.entries, kept.tokens = self.entries, self.begun.tokens
        kept.bits = [self.begun.bits] * len(kept.tokens)
        return kept.unread(tokens), kept.entries


def save_cache(path: Path, entries: list[Any], name: str, model: nn.Module, begun: BegunConversation) -> None:
    """Write the cache of a chat with the model of this name. Raises GearbxError where it cannot be written."""
    metadata = {"model": name, "tokenizer_config": "{}", FINGERPRINT: model_fingerprint(model)}
    metadata[CONVERSATION] = msgspec.json.encode(asdict(begun)).decode()
    with replacing_arrays(path) as place:
        save_prompt_cache(place, plain_cache(entries), metadata)


def load_cache(file: str | None, model: str | None) -> PromptCache | None:
    """Return a prompt cache; None without a file.

    Raises:
        GearbxError: not a prompt cache, or one of another model than the one that is named.
    """
    if file is None:
        return None
    try:
        entries, metadata = load_prompt_cache(file, return_metadata=True)
        mx.eval([part.state for part in entries])  # reads the values, which a truncated file does not have
        made_with = metadata["model"]
        said = metadata.get(CONVERSATION)
        begun = None if said is None else typed(parse_json(said), BegunConversation)
    except Exception as error:  # a file of another kind fails in any way
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); make one with mlx_lm.cache_prompt"
        ) from error
    if model not in (None, made_with):
        raise GearbxError(f"{file}: made with the model {made_with}, not {model}; name that one")
    return PromptCache(file, made_with, entries, begun, metadata.get(FINGERPRINT, ""))
