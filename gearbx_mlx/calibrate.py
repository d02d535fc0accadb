"""python -m gearbx_mlx.calibrate: find the thresholds for a model, and write them for generate --thresholds."""

import argparse
from pathlib import Path
from typing import Any

from . import terminal
from .telemetry.files import write_text

METHODS = ("share", "percentile", "median", "manual")


def setup_arg_parser() -> argparse.ArgumentParser:
    from . import options, target

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.calibrate",
        description="Find entropy thresholds between the gears, and write them to a file for generate --thresholds.",
    )
    options.add_model_flags(parser)
    options.add_prompt_flags(parser)
    parser.set_defaults(max_tokens=options.DEFAULT_MAX_TOKENS)
    options.add_gear_flags(parser)
    parser.set_defaults(telemetry_only=False)
    options.add_gate_flags(parser)
    target.add_flags(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--method",
        choices=METHODS,
        default="share",
        help="share: a wanted share of tokens per gear. percentile: 30th and 60th of the prompts' own tokens. "
        "median: of generated tokens, and 2.5 times it. manual: trivial against hard prompts. Default: share",
    )
    group.add_argument("--shares", help="Parts of 1, lowest gear first, such as 0.6,0.3,0.1. Default: equal parts")
    group.add_argument("--prompts", help="One prompt per line, or JSON Lines as of GSM8K. Default: three that ship.")
    group.add_argument("--num-prompts", type=int, help="Only the first so many prompts.")
    group.add_argument("--trivial", help="Prompts that are easy, for --method manual. Default: three that ship.")
    group.add_argument("--hard", help="Prompts that are hard, for --method manual. Default: three that ship.")
    group.add_argument("--out", default="thresholds.json", help="File to write. Default: thresholds.json")
    return parser


def parse_shares(text: str | None, gears: int) -> list[float]:
    """Raises GearbxError unless there is a number for each gear."""
    from .errors import GearbxError

    if text is None:
        return [1 / gears] * gears
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise GearbxError(f"--shares '{text}' are not numbers with commas between, such as 0.6,0.3,0.1") from error
    if len(shares) != gears:
        raise GearbxError(f"--shares '{text}': give {gears} parts, one for each gear")
    return shares


def generated_entropies(model: Any, tokenizer: Any, observer: Any, tokens: list[int], length: int) -> list[float]:
    """Bits per generated token; the model is not changed."""
    from .decoding.stream import stream_generate

    return [response.entropy for response in stream_generate(model, tokenizer, tokens, length, gearbox=observer)]


def prefill_entropies(model: Any, tokens: list[int]) -> list[float]:
    """Bits at every position of a prompt, from one pass over it."""
    import mlx.core as mx

    from .routing.entropy import entropy_bits

    return [float(h) for h in entropy_bits(model(mx.array(tokens)[None]))[0]]


def record_entropies(
    args: argparse.Namespace, model: Any, tokenizer: Any, config: dict, texts: dict[str, list[str]]
) -> dict[str, list[list[float]]]:
    """Kind of prompt to one list of entropies (bits) for each prompt."""
    from rich.progress import Progress

    from . import options
    from .gears.observer import Observer

    observer = Observer(model, args.gears, dtype=args.dtype)
    samples: dict[str, list[list[float]]] = {kind: [] for kind in texts}
    with Progress(console=terminal.messages, transient=True) as progress:
        for kind, prompts in texts.items():
            for prompt in progress.track(prompts, description=f"{kind} prompts"):
                tokens = options.encode_prompt(args, tokenizer, prompt)
                length = options.room_for(config, len(tokens), args.max_tokens)
                if args.method == "percentile":
                    samples[kind].append(prefill_entropies(model, tokens))
                else:
                    samples[kind].append(generated_entropies(model, tokenizer, observer, tokens, length))
    return samples


def find_thresholds(
    method: str,
    samples: dict[str, list[list[float]]],
    shares: list[float],
    vocab_size: int,
    routing: dict[str, Any],
) -> tuple[float, ...]:
    """Thresholds in bits, by the method asked for."""
    from .routing import calibration

    gears = len(shares)
    pooled = {kind: [h for sequence in sequences for h in sequence] for kind, sequences in samples.items()}
    if method == "percentile":
        return calibration.percentile_thresholds(pooled["mixed"], gears, vocab_size)
    if method == "median":
        return calibration.median_thresholds(pooled["mixed"], gears)
    if method == "manual":
        return calibration.manual_thresholds(pooled["trivial"], pooled["hard"], gears)
    return calibration.share_thresholds(samples["mixed"], shares, vocab_size, **routing)[0]


def chosen_prompts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Kind to prompts: the files that were named, or the few that ship."""
    from . import prompts

    files = {"mixed": (args.prompts, prompts.MIXED)}
    if args.method == "manual":
        files = {"trivial": (args.trivial, prompts.TRIVIAL), "hard": (args.hard, prompts.HARD)}
    return {
        kind: (prompts.read_prompts(Path(file)) if file else list(default))[: args.num_prompts]
        for kind, (file, default) in files.items()
    }


def run(args: argparse.Namespace) -> int:
    from . import options, target
    from .errors import GearbxError
    from .gears.ladder import Ladder

    ladder = Ladder.parse(args.gears)
    if len(ladder) < 2:
        raise GearbxError(f"--gears {ladder}: one gear has no thresholds; give two or more")
    options.check_numbers(args)
    wish = target.wish_of(args)
    if wish:
        return target.run(args, wish, chosen_prompts(args)["mixed"])
    routing = options.gate_settings(args)
    shares = parse_shares(args.shares, len(ladder))
    out = options.output_path(args.out)
    texts = chosen_prompts(args)

    from .gears.discovery import vocabulary
    from .loading import model_name
    from .routing.calibration import reached_shares
    from .routing.thresholds import ThresholdFile

    model, tokenizer, config = options.load_model(args)
    samples = record_entropies(args, model, tokenizer, config, texts)
    thresholds = find_thresholds(args.method, samples, shares, vocabulary(model), routing)
    sequences = [sequence for kind in samples.values() for sequence in kind]
    reached = reached_shares(sequences, thresholds, vocabulary(model), **routing)
    content = ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocabulary(model),
        model=model_name(args.model),
        method=args.method,
        gears=[gear.bits for gear in ladder],
        tokens=sum(map(len, sequences)),
        shares=reached,
        **routing,
    )
    write_text(out, content.text())
    shown = ", ".join(f"{gear.name} {share:.0%}" for gear, share in zip(ladder, reached))
    terminal.note(f"{content.tokens} tokens; with these thresholds the gate puts {shown} of them in each gear")
    print(f"{out}: {', '.join(f'{t:.3f}' for t in thresholds)} bits")
    return 0


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))


if __name__ == "__main__":
    main()
