"""HTTP server of models in gears, and its flags: mlx_lm.server's and the gearbox's."""

import argparse
import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

from ..cli.flags import (
    CacheSettings,
    ControllerSettings,
    GearFlags,
    LayoutSettings,
    ModeFlags,
    ModelSettings,
    OtherServerSettings,
    check_pair,
)
from ..cli.parser import parser_of
from ..cli.start import command
from ..errors import GearbxError, error_context
from ..files.reading import parse_json, typed
from ..routing.gates import DEFAULT_POLICY, policy_named
from ..settings import Settings, flag, flag_of, given_names, parse_bytes

TIME_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_span(text: str) -> float:
    """Return seconds from Ollama's format (90, 90s, 5m, 1h); a negative time is infinite. Raises GearbxError."""
    unit = TIME_UNITS.get(text[-1:].lower())
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise GearbxError(f"--keep-alive: not a time, got '{text}'; use seconds, 5m or 1h")
    return math.inf if seconds < 0 else seconds


def parse_template_args(text: str) -> dict[str, Any]:
    """Return the object of --chat-template-args. Raises GearbxError for other JSON."""
    with error_context("--chat-template-args"):
        return typed(parse_json(text), dict[str, Any])


@dataclass(frozen=True)
class ListenSettings(Settings):
    """Address of the server, and its access rules."""

    title: ClassVar[str] = "server"

    host: str = flag("127.0.0.1", "Host for the HTTP server; 0.0.0.0 accepts other machines", named=True)
    port: int = flag(8080, "Port for the HTTP server; 0: any free port", minimum=0, maximum=65535)
    allowed_origins: str = flag(
        "",
        "Further allowed origins of web pages, such as https://example.org, comma-separated; *: any",
        default_text="none",
        rare=True,
    )
    allowed_hosts: str = flag(
        "",
        "Further allowed host names of requests, beside --host and loopback, comma-separated",
        default_text="none",
        rare=True,
    )
    api_key: str | None = flag(None, "Key that requests must send", default_text="$GEARBX_API_KEY, or none", named=True)
    max_body_bytes: int | None = flag(
        None,
        "Maximum size of a request in bytes",
        default_text="by the model's context",
        minimum=1,
        maximum=2**31,
        rare=True,
    )
    request_timeout: float = flag(
        30.0, "Seconds for a client to send its request", minimum=0.1, maximum=3600, rare=True
    )
    allow_models: bool = flag(False, "Let requests name other models, which then replace this one", rare=True)
    models: str | None = flag(
        None,
        "Directory of checkpoints that requests may name by folder; one is in memory at a time",
        metavar="DIR",
    )
    keep_alive: float | None = flag(
        None,
        "Time that an idle model stays in memory: seconds, 5m or 1h; -1: always",
        default_text="-1; --models: 5m",
        parse=parse_span,
        metavar="TIME",
    )
    log_level: str = flag("INFO", "Logging level", choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), rare=True)


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """Defaults of requests."""

    title: ClassVar[str] = "answers"

    max_tokens: int = flag(512, "Default maximum number of tokens to generate", minimum=1)
    temp: float = flag(0.0, "Default sampling temperature", minimum=0, maximum=1000)
    top_p: float = flag(1.0, "Default nucleus sampling top-p", minimum=0, maximum=1, rare=True)
    top_k: int = flag(0, "Default top-k sampling; 0 disables it", minimum=0, rare=True)
    min_p: float = flag(0.0, "Default min-p sampling; 0 disables it", minimum=0, maximum=1, rare=True)
    chat_template: str = flag("", "Chat template for the tokenizer", rare=True)
    chat_template_args: dict[str, Any] = flag(
        "{}",
        "JSON of arguments for the tokenizer's apply_chat_template, such as '{\"enable_thinking\":false}'",
        parse=parse_template_args,
        rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chat_template and "{" not in self.chat_template:
            why = f"--chat-template: not a template, got {self.chat_template[:200]!a}"
            raise GearbxError(f'{why}; use a template\'s text, such as "$(cat FILE)"')


@dataclass(frozen=True)
class ConcurrencySettings(Settings):
    """Limits of concurrency and of the prompt cache."""

    title: ClassVar[str] = "concurrency"

    decode_concurrency: int = flag(32, "Maximum number of answers generated at once", minimum=1, maximum=4096)
    prompt_concurrency: int = flag(
        8, "Maximum number of prompts prefilled at once, in one gear", minimum=1, maximum=4096, rare=True
    )
    batch_policy: str = flag(
        DEFAULT_POLICY,
        "Gear of a batch, from the requested gears: highest, most (the most frequent) or quantile:Q",
        named=True,
        rare=True,
    )
    share_lookup: bool = flag(
        False,
        "Draft answers with tokens of other requests; an answer's speed may then reveal other users' text",
        rare=True,
    )
    prompt_cache_size: int = flag(
        10, "Maximum number of distinct KV caches to hold in the prompt cache", minimum=1, rare=True
    )
    prompt_cache_bytes: int | None = flag(
        None,
        "Maximum size of the KV caches, such as 2GB",
        default_text="no limit",
        parse=partial(parse_bytes, shown="--prompt-cache-bytes"),
        rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        policy_named(self.batch_policy)


@dataclass(frozen=True)
class ServerSettings:
    listen: ListenSettings
    model: ModelSettings
    answers: AnswerSettings
    concurrency: ConcurrencySettings
    cache: CacheSettings
    layout: LayoutSettings
    gears: GearFlags
    mode: ModeFlags
    controller: ControllerSettings
    others: OtherServerSettings

    def __post_init__(self) -> None:
        check_pair(self)
        if "remember" in self.mode.given() and not self.concurrency.share_lookup:
            raise GearbxError("--remember: keeps all requests for later ones; add --share-lookup, or omit it")
        self.others.check_named()
        if self.others.server is not None:
            self.check_routed()

    def check_routed(self) -> None:
        """Validate the flags of --server. Raises GearbxError for flags of a local model, or fewer than two models."""
        groups = [getattr(self, item.name) for item in fields(self) if item.name not in ("listen", "others")]
        refused = [name for group in groups for name in given_names(group, type(group)())]
        listen = given_names(self.listen, type(self.listen)())
        refused += [name for name in ("allow_models", "models", "keep_alive") if name in listen]
        for name in refused:
            raise GearbxError(f"{flag_of(name)} is for local models; omit it with --server")
        if len(self.others.models) < 2:
            raise GearbxError("--server: needs at least two models; pass --server-model A,B")


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        ServerSettings,
        "server",
        "HTTP server of a model that changes the precision of its weights while it generates, with the flags of "
        "mlx_lm.server. With --server, a proxy that routes prompts among another server's models.",
    )


main = command("server", extra="server")
