"""Flags that the commands share, and what is built from them. Names and defaults are mlx-lm's where it has them."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .decoding.stream import AUTO
from .errors import GearbxError
from .formats import DEFAULT_FORMAT, FORMATS
from .gears.activations import DTYPES
from .gears.discovery import MANAGE, is_quantized
from .gears.gearbox import DEFAULT_KERNELS, DEFAULT_LADDER, GROUP_SIZES, Gearbox
from .gears.ladder import Ladder
from .gears.observer import Observer
from .gears.residency import NAMES as RESIDENCIES
from .kernels.dispatch import KERNELS
from .loading import DEMO_MODEL, context_length, find, load
from .routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, ThresholdGate
from .routing.monitor import DEFAULT_WINDOW, Monitor
from .routing.thresholds import check_thresholds, default_thresholds, read_thresholds
from .telemetry.files import check_writable

DEFAULT_MAX_TOKENS = 100


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="Local directory or Hub repository. Default: the model that ships with gearbx-mlx."
    )
    group.add_argument("--trust-remote-code", action="store_true", help="Enable trusting remote code for tokenizer")
    group.add_argument("--adapter-path", help="Optional path for the trained adapter weights and config.")
    group.add_argument("--extra-eos-token", default=(), nargs="+", help="Add tokens to the list of eos tokens.")
    group.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="Type to compute in. auto: the checkpoint's, but float32 where a CPU runs quantized gears. Default: auto",
    )


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--system-prompt", help="System prompt to be used for the chat template")
    group.add_argument(
        "--ignore-chat-template", action="store_true", help="Use the raw prompt without the chat template."
    )
    group.add_argument("--chat-template-config", help="JSON of additional arguments for `apply_chat_template`.")
    group.add_argument("--max-tokens", "-m", type=int, help="Tokens to generate, -1: as many as fit the context.")
    group.add_argument("--seed", type=int, help="PRNG seed")


def add_ladder_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gears")
    group.add_argument(
        "--gears",
        default=DEFAULT_LADDER,
        help=f"Bits of the gears, ascending; 16: the weights as they are. Default: {DEFAULT_LADDER}",
    )


def add_gear_flags(parser: argparse.ArgumentParser) -> None:
    add_ladder_flags(parser)
    group = parser.add_argument_group("gearbox")
    group.add_argument("--format", choices=list(FORMATS), default=DEFAULT_FORMAT, help=f"Default: {DEFAULT_FORMAT}")
    group.add_argument(
        "--manage", choices=list(MANAGE), default="all", help="Linear layers that change gear. Default: all"
    )
    group.add_argument("--q-group-size", type=int, choices=GROUP_SIZES, default=64, help="Group size. Default: 64")
    group.add_argument(
        "--residency",
        choices=RESIDENCIES,
        default="resident",
        help="Of gears not engaged: kept, moved out of MLX's memory, or dense originals read again from disk.",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default=DEFAULT_KERNELS,
        help="MLX's own, or native ones for the CPU, compiled when first used; auto: native where there are any. "
        f"Default: {DEFAULT_KERNELS}",
    )


def add_routing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument(
        "--thresholds", metavar="FILE|BITS", help="File from gearbx_mlx.calibrate, or bits such as 1.8,3.5."
    )
    group.add_argument("--window", type=int, default=DEFAULT_WINDOW, help=f"Tokens averaged. Default: {DEFAULT_WINDOW}")
    group.add_argument(
        "--hysteresis", type=float, default=DEFAULT_HYSTERESIS, help=f"Bits. Default: {DEFAULT_HYSTERESIS}"
    )
    group.add_argument(
        "--min-gear-duration",
        type=int,
        default=DEFAULT_MIN_GEAR_DURATION,
        help=f"Tokens that a gear is held. Default: {DEFAULT_MIN_GEAR_DURATION}",
    )
    group.add_argument("--initial-gear", default=AUTO, help="Name or bits; auto: from the prompt. Default: auto")


def output_path(text: str | Path) -> Path:
    """Raises GearbxError for a place that cannot be written to."""
    path = Path(text)
    check_writable(path)
    return path


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens == 0 or max_tokens < -1:
        raise GearbxError(f"--max-tokens is {max_tokens}; give 1 or more, or -1 for as many as fit the context")


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration that the model flags name."""
    # Named only when wanted: mlx-lm before 0.32 (Python 3.10) does not know the keyword, and needs it not.
    trust: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    model, tokenizer, config = load(
        args.model, return_config=True, adapter_path=args.adapter_path, tokenizer_config=dict(trust), **trust
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    return model, tokenizer, config


def make_gearbox(args: argparse.Namespace, model: nn.Module, ladder: Ladder) -> Gearbox | Observer:
    """A Gearbox, or an Observer where nothing can or may shift."""
    if args.telemetry_only or is_quantized(model):
        return Observer(model, ladder, dtype=args.dtype)
    return Gearbox(
        model,
        ladder,
        format=args.format,
        manage=args.manage,
        group_size=args.q_group_size,
        residency=args.residency,
        checkpoint=find(args.model or DEMO_MODEL),
        dtype=args.dtype,
        kernels=args.kernels,
    )


def get_thresholds(text: str | None, gears: int, vocab_size: int) -> tuple[float, ...]:
    """Thresholds in bits: the paper's, numbers with commas between, or those of a file."""
    if text is None:
        return default_thresholds(gears, vocab_size)
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        return read_thresholds(Path(text), gears, vocab_size)
    check_thresholds(values, gears)
    return values


def check_routing(args: argparse.Namespace, ladder: Ladder) -> None:
    """Raises GearbxError for routing flags that cannot work, before a model is loaded."""
    Monitor(2, args.window)
    ThresholdGate((), args.hysteresis, args.min_gear_duration)
    if args.initial_gear != AUTO:
        ladder.named(args.initial_gear)
    if args.thresholds and not Path(args.thresholds).exists():
        get_thresholds(args.thresholds, len(ladder), 0)


def encode_prompt(args: argparse.Namespace, tokenizer: Any, prompt: str, prefill: str | None = None) -> list[int]:
    """Tokens of a prompt, through the chat template if the tokenizer has one, as in mlx_lm.generate.

    Raises:
        GearbxError: an empty prompt, or a template configuration that is not JSON.
    """
    if not prompt.strip():
        raise GearbxError("the prompt is empty; give some text with --prompt, or - to read it from standard input")
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    try:
        further = json.loads(args.chat_template_config or "{}")
    except json.JSONDecodeError as error:
        raise GearbxError(f"--chat-template-config is not JSON: {error}") from error
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    messages.append({"role": "user", "content": prompt})
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        continue_final_message=prefill is not None,
        add_generation_prompt=prefill is None,
        **further,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def read_prompt(text: str) -> str:
    """The prompt as given, with \\n and \\t understood; - is standard input."""
    return sys.stdin.read() if text == "-" else text.replace("\\n", "\n").replace("\\t", "\t")


def room_for(config: dict, prompt_tokens: int, max_tokens: int, max_kv_size: int | None = None) -> int:
    """How many tokens to generate after a prompt: a rotating cache (max_kv_size) forgets, and so has no end.

    Raises:
        GearbxError: the prompt leaves no room in the model's context.
    """
    context = context_length(config)
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise GearbxError(
            f"the prompt is {prompt_tokens} tokens, and the model's context {context}; shorten the prompt"
        )
    room = context - prompt_tokens
    if max_kv_size is not None:
        return max_tokens
    return room if max_tokens == -1 else min(max_tokens, room)
