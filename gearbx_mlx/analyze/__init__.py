"""Flags and settings of gearbx_mlx.analyze."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..cli.flags import ModelSettings
from ..cli.gears import LadderSettings, RoutingSettings
from ..cli.prompt import PromptSettings, check_untemplated
from ..cli.settings import Settings, command_settings, flag, flag_of, given, parser_of
from ..cli.start import call, command
from ..errors import LARGEST_SHOWN, GearbxError
from ..serving import APIS, AUTO, DEFAULT_TIMEOUT

KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class AnalyzedServerSettings(Settings):
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
            for name in given(self, AnalyzedServerSettings()):
                raise GearbxError(f"{flag_of(name)} is for a server; name it with --server")
            return
        for name in given(model, ModelSettings()):
            raise GearbxError(f"{flag_of(name)} is for a model that is loaded here; leave it out with --server")
        if prompt.max_tokens == -1:
            raise GearbxError("--max-tokens is -1, and the context of a server is not known; give 1 or more")
        if prompt.ignore_chat_template:
            check_untemplated(prompt)


@dataclass(frozen=True)
class AnalysisSettings(Settings):
    """Which prompts, which gears, and where the report goes."""

    title: ClassVar[str] = "analysis"

    prompts: str = flag(help="One prompt per line, or JSON Lines as in GSM8K.", named=True)
    num_prompts: int | None = flag(None, "Use only this many prompts, the first ones.", least=1)
    out: str = flag("analysis", "Directory for trace, summary and pictures.", named=True)


@dataclass(frozen=True)
class AnalyzeSettings:
    model: ModelSettings
    prompt: PromptSettings
    routing: RoutingSettings
    ladder: LadderSettings
    analysis: AnalysisSettings
    server: AnalyzedServerSettings

    def __post_init__(self) -> None:
        self.server.check(self.model, self.prompt)


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        AnalyzeSettings,
        "analyze",
        "Run prompts with telemetry only: every token is recorded, and no layer changes gear. With --server, the "
        "model is behind a server, whose log-probabilities give bounds of the entropies.",
    )


def analyze(prompts: str | Path, **keywords: Any) -> dict[str, Any]:
    """The summary of `python -m gearbx_mlx.analyze`, after writing its files into the directory `out`.

    Args:
        prompts: a file with one prompt per line, or JSON Lines as in GSM8K.
        keywords: named like the command's flags, with their defaults: model=..., gears="4,8,16".

    Returns:
        the content of summary.json.

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or prompts that cannot be analyzed.
    """
    return call("analyze", "summary_of_analysis", command_settings(AnalyzeSettings, {"prompts": prompts, **keywords}))


main = command("analyze")
