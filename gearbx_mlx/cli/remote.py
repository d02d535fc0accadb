"""Flags of a server of others."""

import os
from dataclasses import dataclass, fields
from typing import ClassVar

from ..errors import GearbxError
from ..serving import APIS, AUTO, DEFAULT_TIMEOUT
from .model import ModelSettings
from .prompt import PromptSettings
from .settings import LARGEST_SHOWN, Settings, flag, flag_of

KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class ServerSettings(Settings):
    """A server, and the model to ask there; without one, the model is loaded here."""

    title: ClassVar[str] = "server"

    server: str | None = flag(
        None, "URL of an OpenAI-style API, such as http://127.0.0.1:8080/v1, or of Ollama.", metavar="URL", named=True
    )
    server_model: str | None = flag(None, "The model's name there. Default: the only one", metavar="NAME", named=True)
    server_api: str = flag(AUTO, "auto: Ollama's own API if the server is Ollama, else OpenAI's.", choices=APIS)
    server_api_key: str | None = flag(None, f"Default: that of the environment, {KEY}", metavar="KEY", named=True)
    server_timeout: float = flag(
        DEFAULT_TIMEOUT, "Seconds to wait for the server, and from one token to the next.", least=0.01, most=1e6
    )
    vocab_size: int | None = flag(
        None,
        "Length of the model's logits, on which the upper bounds depend. Default: what the server says",
        least=2,
        most=LARGEST_SHOWN,
    )

    @property
    def key(self) -> str | None:
        return self.server_api_key if self.server_api_key is not None else os.environ.get(KEY) or None

    def check(self, model: ModelSettings, prompt: PromptSettings) -> None:
        """Raises GearbxError for flags that do not go together."""
        if self.server is None:
            for name in given(self, ServerSettings()):
                raise GearbxError(f"{flag_of(name)} is of a server; name it with --server")
            return
        for name in given(model, ModelSettings()):
            raise GearbxError(f"{flag_of(name)} is of a model that is loaded here; leave it out with --server")
        if prompt.max_tokens == -1:
            raise GearbxError("--max-tokens is -1, and the context of a server is not known; give 1 or more")
        if prompt.ignore_chat_template:
            for name in ("system_prompt", "chat_template_config"):
                if getattr(prompt, name) is not None:
                    raise GearbxError(
                        f"{flag_of(name)} goes into the chat template, which --ignore-chat-template leaves out; "
                        f"leave {flag_of(name)} out"
                    )


def given(settings: Settings, default: Settings) -> list[str]:
    """The settings that differ from their defaults."""
    return [item.name for item in fields(settings) if getattr(settings, item.name) != getattr(default, item.name)]
