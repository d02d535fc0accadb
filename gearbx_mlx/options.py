"""Flags that the commands share, and what is built from them. Names and defaults are mlx-lm's where it has them."""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .decoding.stream import AUTO
from .errors import GearbxError, about
from .files.reading import parse_json, read_as, typed
from .files.writing import check_writable
from .gears.activations import DTYPES
from .gears.attachment import model_fingerprint
from .gears.discovery import vocabulary
from .gears.ladder import Ladder
from .loading import context_length, load, one_line
from .routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, ThresholdGate
from .routing.monitor import DEFAULT_WINDOW, Monitor
from .routing.prompt import first_gear
from .routing.thresholds import ThresholdFile, check_thresholds, default_thresholds, fitting, parse_thresholds

DEFAULT_MAX_TOKENS = 100
MAKE_THRESHOLDS = "write a new one with python -m gearbx_mlx.calibrate"


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


def add_gate_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gate")
    group.add_argument("--window", type=int, help=f"Tokens averaged. Default: {DEFAULT_WINDOW}")
    group.add_argument("--hysteresis", type=float, help=f"Bits. Default: {DEFAULT_HYSTERESIS}")
    group.add_argument(
        "--min-gear-duration", type=int, help=f"Tokens that a gear is held. Default: {DEFAULT_MIN_GEAR_DURATION}"
    )


def add_routing_flags(parser: argparse.ArgumentParser) -> None:
    add_gate_flags(parser)
    group = parser.add_argument_group("routing")
    group.add_argument(
        "--thresholds",
        metavar="FILE|BITS",
        help="File from gearbx_mlx.calibrate, whose gate settings are then the defaults, or bits such as 1.8,3.5.",
    )
    group.add_argument("--initial-gear", default=AUTO, help="Name or bits; auto: from the prompt. Default: auto")


@dataclass(frozen=True)
class Routing:
    """What the gate is made of: bits, tokens, bits, tokens."""

    thresholds: tuple[float, ...]
    window: int
    hysteresis: float
    min_gear_duration: int


def gate_settings(args: argparse.Namespace, file: ThresholdFile | None = None) -> dict[str, Any]:
    """Window, hysteresis and duration, checked: as given, else as calibrated, else the defaults."""
    defaults: dict[str, Any] = {
        "window": DEFAULT_WINDOW,
        "hysteresis": DEFAULT_HYSTERESIS,
        "min_gear_duration": DEFAULT_MIN_GEAR_DURATION,
    }
    if file:
        defaults = {name: getattr(file, name) for name in defaults}
    settings = {
        name: default if getattr(args, name) is None else getattr(args, name) for name, default in defaults.items()
    }
    check_gate(**settings)
    return settings


def check_gate(window: int, hysteresis: float, min_gear_duration: int) -> None:
    """Raises GearbxError for settings that no gate can have."""
    Monitor(2, window)
    ThresholdGate((), hysteresis, min_gear_duration)


def read_thresholds(text: str | None) -> ThresholdFile | tuple[float, ...] | None:
    """What --thresholds names: a file, or numbers with commas between."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return read_as(Path(text), parse_gate, "a thresholds file", MAKE_THRESHOLDS)


def parse_gate(text: str) -> ThresholdFile:
    """A thresholds file from its text. Raises GearbxError for one whose gate settings no gate can have, too."""
    content = parse_thresholds(text)
    check_gate(content.window, content.hysteresis, content.min_gear_duration)
    return content


def make_routing(args: argparse.Namespace, ladder: Ladder, model: nn.Module) -> Routing:
    """Raises GearbxError for thresholds that do not fit the ladder or the model."""
    vocab_size = vocabulary(model)
    given = read_thresholds(args.thresholds)
    if isinstance(given, ThresholdFile):
        try:
            bits = [gear.bits for gear in ladder]
            return Routing(fitting(given, bits, vocab_size, model_fingerprint(model)), **gate_settings(args, given))
        except GearbxError as error:
            raise GearbxError(f"{args.thresholds}: {error}; {MAKE_THRESHOLDS}") from error
    thresholds = default_thresholds(len(ladder), vocab_size) if given is None else given
    check_thresholds(thresholds, len(ladder))
    return Routing(thresholds, **gate_settings(args))


def check_routing(args: argparse.Namespace, ladder: Ladder) -> None:
    """Raises GearbxError for routing flags that cannot work with any model, before one is loaded."""
    given = read_thresholds(args.thresholds)
    gate_settings(args, given if isinstance(given, ThresholdFile) else None)
    if isinstance(given, tuple):
        check_thresholds(given, len(ladder))
    if args.initial_gear != AUTO:
        ladder.find(args.initial_gear)


def initial_gear(args: argparse.Namespace, ladder: Ladder, prompt: str) -> str:
    """The gear to begin in. The prompt is judged as typed: the words of a chat template are not the user's."""
    return ladder[first_gear(prompt, len(ladder))].name if args.initial_gear == AUTO else args.initial_gear


# Least and greatest value that a flag may have.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63),
    "temp": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "min_tokens_to_keep": (1, math.inf),
    "max_kv_size": (1, math.inf),
    "prefill_step_size": (1, math.inf),
    "quantized_kv_start": (0, math.inf),
    "num_draft_tokens": (1, math.inf),
    "num_prompts": (1, math.inf),
    "rows": (1, 2**20),
    "vectors": (1, 2**10),
    "megabytes": (1, 2**20),
    "trials": (1, math.inf),
    "tokens": (1, math.inf),
    "window": (1, 2**31),
    "hysteresis": (0, sys.float_info.max),
}
MULTIPLES = {"cols": 64}
CHOICES = {"kv_bits": (2, 3, 4, 5, 6, 8), "kv_group_size": (32, 64, 128)}


def check_numbers(args: argparse.Namespace) -> None:
    """Raises GearbxError for a number that its flag cannot have."""
    for name, (least, greatest) in RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not least <= value <= greatest:
            upper = f" to {greatest:g}" if greatest < 2**31 else " or more"
            raise GearbxError(f"--{name.replace('_', '-')} is {value}; give {least:g}{upper}")
    for name, choices in CHOICES.items():
        value = getattr(args, name, None)
        if value is not None and value not in choices:
            raise GearbxError(f"--{name.replace('_', '-')} is {value}; choose from {', '.join(map(str, choices))}")
    for name, unit in MULTIPLES.items():
        value = getattr(args, name, None)
        if value is not None and (value < unit or value % unit):
            raise GearbxError(f"--{name} is {value}; give a multiple of {unit}")
    max_tokens = getattr(args, "max_tokens", None)
    if max_tokens is not None and (max_tokens == 0 or max_tokens < -1):
        raise GearbxError(f"--max-tokens is {max_tokens}; give 1 or more, or -1 for as many as fit the context")


def output_path(text: str | Path) -> Path:
    """Raises GearbxError for a place that cannot be written to."""
    path = Path(text)
    check_writable(path)
    return path


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration that the model flags name."""
    # Named only when wanted: mlx-lm before 0.32 (Python 3.10) does not know the keyword, and needs it not.
    trust: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    model, tokenizer, config = load(
        args.model, return_config=True, adapter_path=args.adapter_path, tokenizer_config=dict(trust), **trust
    )
    for token in args.extra_eos_token:
        try:
            tokenizer.add_eos_token(token)
        except ValueError as error:
            raise GearbxError(
                f"--extra-eos-token {token}: {one_line(error)}; give a token of the vocabulary"
            ) from error
    return model, tokenizer, config


def check_prompt(prompt: str) -> None:
    """Raises GearbxError for a prompt that is empty or no Unicode text."""
    if not prompt.strip():
        raise GearbxError("the prompt is empty; give some text with --prompt, or - to read it from standard input")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GearbxError(f"the prompt is not UTF-8 text ({error.reason}); convert it") from error


def encode_prompt(
    args: argparse.Namespace, tokenizer: Any, prompt: str, prefill: str | None = None, after_cache: bool = False
) -> list[int]:
    """Tokens of a prompt, through the chat template if the tokenizer has one, as in mlx_lm.generate.

    Args:
        after_cache: leave out what the template puts before the message: a prompt cache holds it already.

    Raises:
        GearbxError: an empty prompt, or a template configuration that is no JSON object or does not suit it.
    """
    check_prompt(prompt)
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    with about("--chat-template-config"):
        further = typed(parse_json(args.chat_template_config or "{}"), dict[str, Any])

    def templated(message: str) -> str:
        messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
        messages.append({"role": "user", "content": message})
        if prefill is not None:
            messages.append({"role": "assistant", "content": prefill})
        return tokenizer.apply_chat_template(
            messages,
            **{
                "tokenize": False,
                "continue_final_message": prefill is not None,
                "add_generation_prompt": prefill is None,
                **further,
            },
        )

    try:
        text = templated(prompt)
        if after_cache:
            text = text[templated("<query>").index("<query>") :]
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # a template is a program, and raises what it likes
        raise GearbxError(
            f"the chat template refuses this ({one_line(error)}); use --ignore-chat-template or change the messages"
        ) from error


def read_prompt(text: str) -> str:
    """The prompt as given, with \\n and \\t understood; - is standard input.

    Raises:
        GearbxError: standard input that is not UTF-8.
    """
    if text != "-":
        return text.replace("\\n", "\n").replace("\\t", "\t")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise GearbxError(f"standard input is not UTF-8 text ({error.reason}); convert it") from error


def room_for(config: dict, prompt_tokens: int, max_tokens: int, max_kv_size: int | None = None) -> int:
    """How many tokens to generate after a prompt: a rotating cache (max_kv_size) forgets, and so has no end.

    `prompt_tokens` counts those of a prompt cache as well.

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
