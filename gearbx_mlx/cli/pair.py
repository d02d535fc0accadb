"""--small-model: what the commands share of two models that take turns."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import get_total_parameters
from rich.table import Table
from rich.text import Text

from ..decoding.paired_model import bytes_read
from ..decoding.stream import AUTO, PAIR
from ..errors import GearbxError
from ..gears.activations import compute_in, dtype_name, model_dtype, stored_dtype
from ..gears.discovery import is_quantized, vocabulary
from ..loading import load_small, model_name
from ..routing.pair import (
    BITS,
    DEFAULT_MIN_DURATION,
    DEFAULT_WINDOW,
    NAMES,
    SWEEP,
    check_threshold,
    pair_gate,
    pair_monitor,
    parameter_ratio,
    scaled,
)
from ..telemetry.colors import gear_color
from ..telemetry.summary import Tally, summarize
from . import options, terminal
from .results import Speed


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


def is_pair(args: argparse.Namespace) -> bool:
    """Whether two models are asked for.

    Raises:
        GearbxError: one of --mode pair and --small-model without the other, or flags of a single model.
    """
    if args.mode not in (None, PAIR):
        if args.small_model is not None:
            raise GearbxError(f"--mode {args.mode} has one model; leave --small-model out, or give --mode pair")
        return False
    if args.small_model is None:
        if args.mode == PAIR:
            raise GearbxError("--mode pair needs --small-model, a smaller model with the tokenizer of --model")
        return False
    for name in ("draft_model", "prompt_cache_file", "gears", "curve", "draft_length", "telemetry_only"):
        if getattr(args, name):
            raise GearbxError(f"--{name.replace('_', '-')} is of one model; leave it out with --small-model")
    if args.initial_gear not in (AUTO, *NAMES):
        raise GearbxError(f"--initial-gear {args.initial_gear}: a pair has {AUTO}, {', '.join(NAMES)}")
    return True


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


def summary_of_pair(
    args: argparse.Namespace, pair: Pair, turns: Turns, tally: Tally, speed: Speed, peak_memory: int
) -> dict[str, Any]:
    """The summary of one run; `peak_memory` in bytes."""
    read, parameters = dict(zip(NAMES, pair.weight_bytes)), dict(zip(NAMES, pair.parameters))
    bits = {name: 8 * read[name] / parameters[name] for name in NAMES}
    return summarize(
        tally,
        model=model_name(args.model),
        small_model=args.small_model,
        mode=PAIR,
        ladder=[{"name": name, "bits": bits[name], "bytes_per_weight": bits[name] / 8} for name in NAMES],
        bits_per_weight=bits,
        weight_bytes=read,
        parameters=parameters,
        parameter_ratio=parameter_ratio(tally.mean(tally.gear_tokens["large"]), pair.parameters),
        threshold_bits=turns.threshold(pair.vocab_size),
        window=turns.window,
        min_gear_duration=turns.min_duration,
        tokens_per_second=speed.tokens_per_second,
        prompt_tokens=speed.prompt_tokens,
        prompt_tokens_per_second=speed.prompt_tokens_per_second,
        peak_memory_bytes=peak_memory,
        compute_dtype=dtype_name(model_dtype(pair.large)),
        storage_dtype=dtype_name(stored_dtype(pair.large)),
    )


def pair_table(summary: dict[str, Any]) -> Table:
    """The table under a generated text."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    read, top = summary["weight_bytes_per_token"], summary["weight_bytes_per_token_top"]
    shares = Text()
    for i, name in enumerate(NAMES):
        parameters = summary["parameters"][name] / 1e6
        shares.append(f"{name} ({parameters:.3g} M) {summary['shares'][name]:.0%}   ", style=gear_color(i, len(NAMES)))
    table.add_row("models", Text(f"{summary['small_model']}, {summary['model']}  ({PAIR})"))
    table.add_row("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s")
    table.add_row("prompt", f"{summary['prompt_tokens']} tokens, {summary['prompt_tokens_per_second']:.1f} tokens/s")
    table.add_row("turns", shares)
    table.add_row("switches", f"{summary['shifts']}; {summary['caught_up_tokens']} tokens read to catch up")
    table.add_row(
        "mean entropy", f"{summary['mean_entropy_bits']:.2f} bits; the threshold is {summary['threshold_bits']:.3g}"
    )
    table.add_row("parameters", f"{summary['parameter_ratio']:.0%} of the large model's per token")
    against = f", the large model {terminal.human_bytes(top)} ({top / read:.2f} times as much)" if read else ""
    table.add_row("weights read", f"{terminal.human_bytes(read)} per token{against}")
    table.add_row("memory", f"peak {terminal.human_bytes(summary['peak_memory_bytes'])}")
    return table
