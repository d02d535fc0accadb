"""Prompt caches in files: mlx-lm's, and those of chats, which go on as the chat would.

What a chat template puts between an answer and the next message is in no cache. So the file of a chat has the text of
the conversation too, up to where the next message begins, and `generate` reads what the cache does not have of it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from ..decoding.caches import KeptCache, check_prompt_cache, plain_cache
from ..errors import GearbxError, about, one_line
from ..files.reading import parse_json, typed
from ..files.writing import replacing

CONVERSATION = "conversation"  # where it is in the metadata


@dataclass(frozen=True)
class Begun:
    """A conversation that goes on.

    before: its text up to where the next message begins. templated: a chat template made it.
    tokens: those in the cache.
    """

    before: str
    templated: bool
    tokens: list[int]


@dataclass(frozen=True)
class PromptCache:
    """The caches of a model's layers, as a file has them; `begun` is None for one that no chat saved."""

    file: str
    model: str
    entries: list[Any]
    begun: Begun | None

    def before(self, templated: bool) -> str:
        """What stands before the message in the template's place; "" where the cache is all that is known of it."""
        return self.begun.before if self.begun is not None and self.begun.templated == templated else ""

    def unread(
        self, model: nn.Module, tokens: list[int], max_kv_size: int | None, before: str
    ) -> tuple[list[int], list[Any]]:
        """Those of the tokens that the cache does not have, and the caches that go on with them.

        Args:
            max_kv_size: of caches that are made anew, as where states cannot be cut to what the tokens begin with.
            before: what the tokens begin with; "": they follow the cache.

        Raises:
            GearbxError: the cache does not suit the model.
        """
        with about(self.file):
            check_prompt_cache(self.entries, model)
        if not before or self.begun is None:
            return tokens, self.entries
        kept = KeptCache(lambda: make_prompt_cache(model, max_kv_size))
        kept.entries, kept.tokens = self.entries, self.begun.tokens
        return kept.unread(tokens), kept.entries


def save_cache(path: Path, entries: list[Any], model: str, begun: Begun) -> None:
    """Write the cache of a chat. Raises GearbxError where it cannot be written."""
    metadata = {"model": model, "tokenizer_config": "{}", CONVERSATION: msgspec.json.encode(asdict(begun)).decode()}
    with replacing(path) as place:
        beside = place.with_name(f"{place.name}.safetensors")  # save_safetensors adds the suffix to any other name
        try:
            save_prompt_cache(str(beside), plain_cache(entries), metadata)
            beside.replace(place)
        except RuntimeError as error:  # MLX's, of a disk that is full for instance
            raise GearbxError(f"{path}: cannot be written ({one_line(error)}); choose another place") from error
        finally:
            beside.unlink(missing_ok=True)


def load_cache(file: str | None, model: str | None) -> PromptCache | None:
    """A prompt cache; None without a file.

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
        begun = None if said is None else typed(parse_json(said), Begun)
    except Exception as error:  # a file of another kind fails in any way
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); make one with mlx_lm.cache_prompt"
        ) from error
    if model not in (None, made_with):
        raise GearbxError(f"{file}: made with the model {made_with}, not {model}; name that one")
    return PromptCache(file, made_with, entries, begun)
