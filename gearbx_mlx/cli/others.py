"""Flags that name a server of others, of the commands that ask one."""

import os
from dataclasses import dataclass
from typing import ClassVar

from ..errors import LARGEST_SHOWN, GearbxError
from ..serving import DEFAULT_TIMEOUT
from ..settings import Settings, flag, flag_of, given

KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class OtherServerSettings(Settings):
    """A server, and the model to ask there; without one, the model is loaded here."""

    title: ClassVar[str] = "another server"

    server: str | None = flag(
        None,
        "URL of an API like OpenAI's, such as http://127.0.0.1:8080/v1, whose models are asked in place of --model.",
        metavar="URL",
        named=True,
    )
    server_model: str | None = flag(
        None,
        "The model's name there. For the command server two or more, with commas between, the first with the fewest "
        "bits. Default: the only one",
        metavar="NAME",
        named=True,
    )
    server_api_key: str | None = flag(
        None, f"Default: that of the environment, {KEY}", metavar="KEY", named=True, rare=True
    )
    server_timeout: float = flag(
        DEFAULT_TIMEOUT,
        "Seconds to wait for a whole answer, or for a stream's next token.",
        least=0.01,
        most=1e6,
        rare=True,
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

    @property
    def models(self) -> tuple[str, ...]:
        """The names between the commas."""
        return tuple(name.strip() for name in (self.server_model or "").split(",") if name.strip())

    def check_named(self) -> None:
        """Raises GearbxError for a flag of a server that is not named."""
        for name in given(self, OtherServerSettings()) if self.server is None else ():
            raise GearbxError(f"{flag_of(name)} is for a server; name it with --server")
