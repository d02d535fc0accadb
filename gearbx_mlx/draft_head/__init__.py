"""Flags of `draft-head`, and their settings."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..cli.flags import ModelSettings
from ..cli.parser import parser_of
from ..cli.prompt import PromptSettings
from ..cli.start import command
from ..settings import Settings, flag

DESCRIPTION = (
    "Train a draft head in the EAGLE-3 format on the model's own answers. To continue an interrupted run, or to train "
    "longer, repeat the command."
)
MAX_ROWS = 16_000


@dataclass(frozen=True)
class PromptTextSettings(PromptSettings):
    """Conversion of prompts to tokens, and the length of the answers to learn."""

    title: ClassVar[str] = "answers"

    max_tokens: int = flag(180, "Maximum number of tokens in an answer; -1: as many as fit the context", also=("-m",))
    data: str | None = flag(
        None, "File with one prompt per line, or JSON Lines with prompt or text", default_text="bundled", named=True
    )
    num_prompts: int | None = flag(None, "Number of prompts to use, from the first", default_text="all", minimum=25)


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Output, time and sizes of the head."""

    title: ClassVar[str] = "head"

    out: str = flag("draft-head", "Directory for the head and the training state", named=True)
    minutes: float | None = flag(
        None, "Total minutes, including the answers", default_text="estimated", minimum=0.01, maximum=1e6
    )
    draft_vocab_size: int = flag(MAX_ROWS, "Maximum number of tokens that can be drafted", minimum=16, maximum=2**20)
    q_bits: int | None = flag(
        None, "Bits of the saved weights, for MLX only", default_text="16, for any program", choices=(4, 8)
    )
    embeddings: bool = flag(False, "Save a copy of the model's embeddings too, as mlx-vlm and vLLM require")
    intermediate_size: int | None = flag(
        None, "Width of the head's MLP", default_text="the model's", minimum=32, maximum=2**20, rare=True
    )
    num_attention_heads: int | None = flag(
        None, "Attention heads of the head", default_text="the model's", minimum=1, maximum=2**12, rare=True
    )


@dataclass(frozen=True)
class DraftHeadSettings:
    """All settings of `draft-head`."""

    model: ModelSettings
    answers: PromptTextSettings
    training: TrainingSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(DraftHeadSettings, "draft_head", DESCRIPTION)


main = command("draft_head")
