"""Flags of gearbx_mlx.server: mlx_lm.server's, and the gearbox's."""

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
    """Return seconds, as Ollama writes them: 90, 90s, 5m, 1h; below zero: always. Raises GearbxError for no time."""
    unit = TIME_UNITS.get(text[-1:].lower())
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise GearbxError(f"--keep-alive: '{text}' is not a time; give seconds, 5m or 1h")
    return math.inf if seconds < 0 else seconds


@dataclass(frozen=True)
class ListenSettings(Settings):
    """Where the server listens, and who may come in."""

    title: ClassVar[str] = "server"

    host: str = flag("127.0.0.1", "Host for the HTTP server; 0.0.0.0 lets other machines in.", named=True)
    port: int = flag(8080, "Port for the HTTP server; 0: any that is free.", least=0, most=65535)
    allowed_origins: str = flag(
        "",
        "Origins of pages beside the server's own that may ask, such as https://example.org, with commas between; *: "
        "any. Default: none",
        rare=True,
    )
    allowed_hosts: str = flag(
        "",
        "Names by which requests may reach the server, beside --host and this machine's loopback, with commas between. "
        "Default: none",
        rare=True,
    )
    api_key: str | None = flag(
        None, "Key that requests must bring. Default: the environment's GEARBX_API_KEY, or none", named=True
    )
    max_body_bytes: int | None = flag(
        None, "The most bytes of a request. Default: as the model's context needs", least=1, most=2**31, rare=True
    )
    request_timeout: float = flag(
        30.0, "Seconds that a client has to send its request.", least=0.1, most=3600, rare=True
    )
    allow_models: bool = flag(
        False, "Requests may name other models, which are then loaded in place of this one.", rare=True
    )
    models: str | None = flag(
        None,
        "Directory whose checkpoints requests may ask for by the names of their folders; one is in memory at a time.",
        metavar="DIR",
    )
    keep_alive: float | None = flag(
        None,
        "How long a model stays in memory after its last answer: seconds, 5m or 1h; -1: always. Default: 5m with "
        "--models, else -1",
        parse=parse_span,
        metavar="TIME",
    )
    log_level: str = flag(
        "INFO", "Set the logging level.", choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), rare=True
    )


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """What requests get that do not say it themselves."""

    title: ClassVar[str] = "answers"

    max_tokens: int = flag(512, "Default maximum number of tokens to generate.", least=1)
    temp: float = flag(0.0, "Default sampling temperature.", least=0, most=1000)
    top_p: float = flag(1.0, "Default nucleus sampling top-p.", least=0, most=1, rare=True)
    top_k: int = flag(0, "Default top-k sampling; 0 disables it.", least=0, rare=True)
    min_p: float = flag(0.0, "Default min-p sampling; 0 disables it.", least=0, most=1, rare=True)
    chat_template: str = flag("", "Specify a chat template for the tokenizer", rare=True)
    chat_template_args: str = flag(
        "{}",
        "JSON of arguments for the tokenizer's apply_chat_template, e.g. '{\"enable_thinking\":false}'.",
        rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.template_arguments()
        if self.chat_template and "{" not in self.chat_template:
            raise GearbxError(
                f"--chat-template is {self.chat_template[:200]!a}, which shows no message; give a template's text, "
                'of a file "$(cat FILE)"'
            )

    def template_arguments(self) -> dict[str, Any]:
        """Raises GearbxError unless --chat-template-args is a JSON object."""
        with error_context("--chat-template-args"):
            return typed(parse_json(self.chat_template_args), dict[str, Any])


@dataclass(frozen=True)
class ConcurrencySettings(Settings):
    """How much is done and kept at once."""

    title: ClassVar[str] = "concurrency"

    decode_concurrency: int = flag(32, "Answers that are in the making at once.", least=1, most=4096)
    prompt_concurrency: int = flag(
        8, "Prompts that are read at once, of answers in one gear.", least=1, most=4096, rare=True
    )
    batch_policy: str = flag(
        DEFAULT_POLICY,
        "The gear of a step in which several texts share the weights, by the gears that they want: highest, most (the "
        "most wanted), or quantile:Q (the lowest that is enough for a share Q of them).",
        named=True,
        rare=True,
    )
    prompt_cache_size: int = flag(
        10, "Maximum number of distinct KV caches to hold in the prompt cache.", least=1, rare=True
    )
    prompt_cache_bytes: int | None = flag(
        None,
        "Maximum size in bytes of the KV caches, such as 2GB. Default: no limit",
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
        self.others.check_named()
        if self.others.server is not None:
            self.check_routed()

    def check_routed(self) -> None:
        """Raises GearbxError for flags of a model that is served here, or fewer than two models to choose from."""
        groups = [getattr(self, item.name) for item in fields(self) if item.name not in ("listen", "others")]
        refused = [name for group in groups for name in given_names(group, type(group)())]
        refused += [name for name in ("allow_models", "models", "keep_alive") if getattr(self.listen, name)]
        for name in refused:
            raise GearbxError(f"{flag_of(name)} is for models that are served here; leave it out with --server")
        if len(self.others.models) < 2:
            raise GearbxError("--server needs two models or more to choose from; name them with --server-model A,B")


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        ServerSettings,
        "server",
        "Serve a model that changes the precision of its weights while it writes, as mlx_lm.server serves models. With "
        "--server, prompts are passed on to one of several models there.",
    )


main = command("server", extra="server")
