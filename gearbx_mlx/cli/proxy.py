"""Flags of a proxy between two servers."""

import os
from dataclasses import dataclass
from typing import ClassVar

from ..errors import GearbxError
from ..serving import ASSUMED_VOCABULARY
from .settings import LARGEST_SHOWN, Settings, flag, flag_of

KEYS = "GEARBX_SMALL_SERVER_KEY", "GEARBX_LARGE_SERVER_KEY"
SERVERS = "small_server", "large_server"


@dataclass(frozen=True)
class ProxySettings(Settings):
    """Two servers between which requests are routed; without them, a model is served here."""

    title: ClassVar[str] = "two servers"

    small_server: str | None = flag(
        None,
        "URL of an OpenAI-style API that answers what it is sure of; with --large-server, in the place of --model. "
        f"For them --thresholds, --window and --min-gear-duration are those of --small-model. Key: {KEYS[0]} of the "
        "environment",
        metavar="URL",
        named=True,
    )
    large_server: str | None = flag(
        None, f"URL of the API that answers the rest. Key: {KEYS[1]} of the environment", metavar="URL", named=True
    )
    small_server_model: str | None = flag(
        None, "The model's name there. Default: as each request says", metavar="NAME", named=True
    )
    large_server_model: str | None = flag(
        None, "The model's name there. Default: as each request says", metavar="NAME", named=True
    )
    connect_timeout: float = flag(5.0, "Seconds that a server has to take a connection.", least=0.01, most=3600)
    server_timeout: float = flag(
        600.0, "Seconds to wait for a server's next bytes: of a whole answer, for all of it.", least=0.01, most=1e6
    )
    vocab_size: int = flag(
        ASSUMED_VOCABULARY,
        "Length of the small model's logits, on which the upper bounds of the entropy depend.",
        least=2,
        most=LARGEST_SHOWN,
    )
    no_fallback: bool = flag(False, "Answer 502 where a server fails, instead of asking the other one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in SERVERS if getattr(self, name) is not None]
        if len(given) == 1:
            other = next(name for name in SERVERS if name not in given)
            raise GearbxError(f"{flag_of(given[0])} needs another one beside it; give {flag_of(other)} too")

    @property
    def wanted(self) -> bool:
        return self.small_server is not None

    def key(self, server: int) -> str | None:
        """The key of a server. Raises GearbxError for one that no header can have."""
        key = os.environ.get(KEYS[server]) or None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise GearbxError(
                f"{KEYS[server]} of the environment has characters that no HTTP header can have; check it"
            )
        return key
