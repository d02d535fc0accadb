"""--small-model: what the commands share of two models that take turns."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import get_total_parameters

from . import options
from .decoding.paired_model import bytes_read
from .errors import GearbxError
from .gears.activations import compute_in
from .gears.discovery import is_quantized, vocabulary
from .loading import load_small
from .routing.pair import (
    BITS,
    DEFAULT_MIN_DURATION,
    DEFAULT_WINDOW,
    SWEEP,
    check_threshold,
    pair_gate,
    pair_monitor,
    scaled,
)


def add_pair_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("two models that take turns (EAD)")
    group.add_argument(
        "--small-model",
        help="Local directory or Hub repository of a smaller model with the tokenizer of --model. For it --thresholds "
        f"is bits, 0 (large alone) to inf (small alone; default: {BITS:g}, scaled to the vocabulary), --window "
        f"{DEFAULT_WINDOW} and --min-gear-duration {DEFAULT_MIN_DURATION} unless given.",
    )


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    """Of the evaluation, which takes several thresholds."""
    add_pair_flags(parser)
    parser.add_argument(
        "--answers-only",
        action="store_true",
        help="With --small-model: of questions and answers count the answers, which alone are written in generation.",
    )


@dataclass(frozen=True)
class Pair:
    """Two loaded models and what they are: (small, large) each."""

    small: nn.Module
    large: nn.Module
    tokenizer: Any
    config: dict

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.small, self.large

    @property
    def vocab_size(self) -> int:
        return min(vocabulary(model) for model in self.models)

    @property
    def parameters(self) -> tuple[int, int]:
        """Quantized ones counted as what they stand for."""
        small, large = (int(get_total_parameters(model)) for model in self.models)
        return small, large

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """That a token reads, in the type of the checkpoint."""
        return bytes_read(self.small), bytes_read(self.large)


def load_pair(args: argparse.Namespace) -> Pair:
    """Both models as loaded, in the type that --dtype asks for.

    Raises:
        GearbxError: a model that cannot be loaded, or another tokenizer.
    """
    large, tokenizer, config = options.load_model(args)
    trust: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    small = load_small(args.small_model, tokenizer, tokenizer_config=dict(trust), **trust)
    for model in (small, large):
        compute_in(model, args.dtype, is_quantized(model))
    return Pair(small, large, tokenizer, config)


@dataclass(frozen=True)
class Turns:
    """Settings of the gate; no thresholds: the paper's."""

    thresholds: tuple[float, ...]
    window: int
    min_duration: int

    def sweep(self, vocab_size: int) -> tuple[float, ...]:
        """The thresholds of a sweep, in bits: as given, else those of EAD's Table 1, scaled to the vocabulary."""
        return self.thresholds or tuple(bits if math.isinf(bits) else scaled(bits, vocab_size) for bits in SWEEP)

    def threshold(self, vocab_size: int) -> float:
        """The one threshold of a generation, in bits."""
        return self.thresholds[0] if self.thresholds else scaled(BITS, vocab_size)


def turns_of(args: argparse.Namespace, several: bool = False) -> Turns:
    """What --thresholds, --window and --min-gear-duration say.

    Args:
        several: a sweep over thresholds, each between 0 and infinity.

    Raises:
        GearbxError: what cannot be, before a model is loaded.
    """
    if getattr(args, "hysteresis", None):
        raise GearbxError("--hysteresis: the gate between two models has none; leave it out")
    thresholds: tuple[float, ...] = ()
    if args.thresholds is not None:
        try:
            thresholds = tuple(float(part) for part in args.thresholds.split(","))
        except ValueError as error:
            raise GearbxError(
                f"--thresholds {args.thresholds}: with --small-model give bits, such as {BITS:g}"
            ) from error
        if len(thresholds) > 1 and not several:
            raise GearbxError(f"--thresholds {args.thresholds}: two models have one threshold between them")
        for bits in thresholds:
            check_threshold(bits)
    window = DEFAULT_WINDOW if args.window is None else args.window
    duration = DEFAULT_MIN_DURATION if args.min_gear_duration is None else args.min_gear_duration
    pair_monitor(2, window)
    pair_gate(BITS, duration)
    return Turns(thresholds, window, duration)
