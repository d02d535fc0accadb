"""Flags and settings of gearbx_mlx.generate."""

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from ..cli.flags import (
    CacheSettings,
    ControllerSettings,
    GearFlags,
    LayoutSettings,
    ModeFlags,
    ModelSettings,
    OutputSettings,
    SamplingSettings,
    check_pair,
)
from ..cli.parser import parser_of
from ..cli.prompt import PromptSettings
from ..cli.start import command
from ..settings import Settings, flag

if TYPE_CHECKING:
    from ..decoding.stream import generate as generate

DEFAULT_PROMPT = (
    "A baker makes 36 rolls in the morning and half as many in the afternoon. "
    "She sells each roll for $2. How much money does she earn that day?"
)


@dataclass(frozen=True)
class InputSettings(Settings):
    """The prompt, the start of its answer, and a prompt cache."""

    title: ClassVar[str] = "input"

    prompt: str = flag(
        DEFAULT_PROMPT,
        "Message to be processed; -: read from stdin",
        default_text="piped input, or a word problem",
        also=("-p",),
    )
    prefill_response: str | None = flag(None, "Beginning of the answer, for the chat template", rare=True)
    prompt_cache_file: str | None = flag(None, "File with saved KV caches to continue", named=True, rare=True)


@dataclass(frozen=True)
class GenerateSettings:
    model: ModelSettings
    prompt: PromptSettings
    input: InputSettings
    sampling: SamplingSettings
    cache: CacheSettings
    layout: LayoutSettings
    gears: GearFlags
    mode: ModeFlags
    controller: ControllerSettings
    output: OutputSettings

    def __post_init__(self) -> None:
        check_pair(self, {"prompt_cache_file": self.input.prompt_cache_file})


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        GenerateSettings,
        "generate",
        "Generate text with a model that changes the precision of its weights during generation. "
        "`generate MODEL PROMPT` means --model MODEL --prompt PROMPT.",
        "Modes: lossless: the low gear drafts, the top gear verifies, with the output of --mode static. route: the "
        "entropy of past tokens sets the gear. kickdown: an uncertain token is computed again, one gear higher. "
        "static: one gear. pair: two models take turns. telemetry-only: records entropies, and no layer changes gear.",
    )
    parser.words = ("model", "prompt")
    return parser


def __getattr__(name: str) -> Any:
    """Return the function `generate`: mlx-lm's, in gears. Its import takes seconds, so `--help` avoids it."""
    if name != "generate":
        raise AttributeError(f"module 'gearbx_mlx.generate' has no attribute '{name}'")
    return import_module("gearbx_mlx.decoding.stream").generate


main = command("generate")
