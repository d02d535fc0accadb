"""python -m gearbx_mlx.calibrate: find the thresholds for a model, and write them for generate --thresholds."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import terminal
from .telemetry.files import write_text

METHODS = ("share", "percentile", "median", "manual")


def setup_arg_parser() -> argparse.ArgumentParser:
    from . import options

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.calibrate",
        description="Find entropy thresholds between the gears, and write them to a file for generate --thresholds.",
    )
    options.add_model_flags(parser)
    options.add_prompt_flags(parser)
    parser.set_defaults(max_tokens=options.DEFAULT_MAX_TOKENS)
    options.add_ladder_flags(parser)
    options.add_routing_flags(parser)
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


def generated_entropies(
    model: Any, tokenizer: Any, prompts: Iterable[list[int]], lengths: list[int], ladder: Any
) -> list[list[float]]:
    """Bits per generated token, one list for each prompt; the model is not changed."""
    from .decoding.stream import stream_generate
    from .gears.observer import Observer

    observer = Observer(model, ladder)
    return [
        [r.entropy for r in stream_generate(model, tokenizer, tokens, length, gearbox=observer)]
        for tokens, length in zip(prompts, lengths)
    ]


def prefill_entropies(model: Any, prompts: Iterable[list[int]]) -> list[float]:
    """Bits at every position of the prompts, from one pass over each."""
    import mlx.core as mx

    from .routing.entropy import entropy_bits

    return [float(h) for tokens in prompts for h in entropy_bits(model(mx.array(tokens)[None]))[0]]


def run(args: argparse.Namespace) -> int:
    from . import options, prompts
    from .errors import GearbxError
    from .gears.ladder import Ladder
    from .routing import calibration

    ladder = Ladder.parse(args.gears)
    gears = len(ladder)
    if gears < 2:
        raise GearbxError(f"--gears {ladder}: one gear has no thresholds; give two or more")
    options.check_max_tokens(args.max_tokens)
    options.check_routing(args, ladder)
    shares = parse_shares(args.shares, gears)
    out = options.output_path(args.out)

    def chosen(file: str | None, default: tuple[str, ...]) -> list[str]:
        return (prompts.read_prompts(Path(file)) if file else list(default))[: args.num_prompts]

    texts = {"mixed": chosen(args.prompts, prompts.MIXED)}
    if args.method == "manual":
        texts = {"trivial": chosen(args.trivial, prompts.TRIVIAL), "hard": chosen(args.hard, prompts.HARD)}

    import mlx.core as mx
    from rich.progress import Progress

    from .gears.discovery import vocabulary
    from .loading import model_name
    from .routing.thresholds import ThresholdFile

    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer, config = options.load_model(args)
    vocab_size = vocabulary(model)
    samples: dict[str, list[list[float]]] = {}
    with Progress(console=terminal.messages, transient=True) as progress:
        for kind, lines in texts.items():
            encoded = [options.encode_prompt(args, tokenizer, line) for line in lines]
            lengths = [options.room_for(config, len(tokens), args.max_tokens) for tokens in encoded]
            tracked = progress.track(encoded, description=f"{kind} prompts")
            if args.method == "percentile":
                samples[kind] = [prefill_entropies(model, tracked)]
            else:
                samples[kind] = generated_entropies(model, tokenizer, tracked, lengths, ladder)

    flat = {kind: [h for sequence in sequences for h in sequence] for kind, sequences in samples.items()}
    routing = (args.window, args.hysteresis, args.min_gear_duration)
    if args.method == "share":
        thresholds, _ = calibration.share_thresholds(samples["mixed"], shares, vocab_size, *routing)
    elif args.method == "percentile":
        thresholds = calibration.percentile_thresholds(flat["mixed"], gears, vocab_size)
    elif args.method == "median":
        thresholds = calibration.median_thresholds(flat["mixed"], gears)
    else:
        thresholds = calibration.manual_thresholds(flat["trivial"], flat["hard"], gears)

    sequences = [sequence for kind in samples.values() for sequence in kind]
    reached = calibration.reached_shares(sequences, thresholds, vocab_size, *routing)
    content = ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocab_size,
        model=model_name(args.model),
        method=args.method,
        gears=[gear.bits for gear in ladder],
        tokens=sum(map(len, sequences)),
        window=args.window,
        hysteresis=args.hysteresis,
        min_gear_duration=args.min_gear_duration,
        shares=reached,
    )
    assert out is not None
    write_text(out, content.text())
    shown = ", ".join(f"{gear.name} {share:.0%}" for gear, share in zip(ladder, reached))
    terminal.note(f"{content.tokens} tokens; with these thresholds the gate puts {shown} of them in each gear")
    print(f"{out}: {', '.join(f'{t:.3f}' for t in thresholds)} bits")
    return 0


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))


if __name__ == "__main__":
    main()
