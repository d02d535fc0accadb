"""python -m gearbx_mlx.calibrate: find when a model is to change gear, and write it to a file for generate."""

import argparse
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..files.writing import write_text

METHODS = ("share", "percentile", "median", "manual")
MODES = ("route", "kickdown", "lossless")
OUT = {"route": "thresholds.json", "kickdown": "thresholds.json", "lossless": "drafting.json"}
# Ladders that are compared where none is given: one stack for the draft alone, and stacks that serve other modes too.
DRAFT_LADDERS = {
    16: ("3,16", "4,16", "5,16", "6,16", "4,8,16", "3,4,8,16"),
    8: ("3,8", "4,8", "5,8", "6,8", "3,4,8"),
}
DRAFT_BITS = range(3, 7)


def setup_arg_parser() -> argparse.ArgumentParser:
    from ..cli import gears as options_gears
    from ..cli import options
    from . import calibrate_target as target

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.calibrate",
        description="Find entropy thresholds between the gears, for generate --thresholds, or when to stop drafting, "
        "for generate --mode lossless --curve.",
    )
    options.add_model_flags(parser)
    options.add_prompt_flags(parser)
    options_gears.add_gear_flags(parser)
    parser.set_defaults(max_tokens=options.DEFAULT_MAX_TOKENS, gears=None, telemetry_only=False)
    options.add_gate_flags(parser)
    target.add_flags(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--mode",
        choices=MODES,
        default="route",
        help="route, kickdown: thresholds. lossless: the gear that drafts, its curve, and the bound, those that read "
        "the fewest bytes of weights per token; of --gears, or of several ladders. Default: route",
    )
    group.add_argument(
        "--top", type=int, choices=list(DRAFT_LADDERS), default=16, help="For lossless without --gears. Default: 16"
    )
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
    group.add_argument("--out", help="File to write. Default: thresholds.json, or drafting.json for lossless")
    return parser


def parse_shares(text: str | None, gears: int) -> list[float]:
    """Raises GearbxError unless there is a number for each gear."""
    from ..errors import GearbxError

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
    from ..decoding.stream import stream_generate

    return [response.entropy for response in stream_generate(model, tokenizer, tokens, length, gearbox=observer)]


def prefill_entropies(model: Any, tokens: list[int]) -> list[float]:
    """Bits at every position of a prompt, from one pass over it."""
    import mlx.core as mx

    from ..routing.entropy import entropy_bits

    return [float(h) for h in entropy_bits(model(mx.array(tokens)[None]))[0]]


def record_entropies(
    args: argparse.Namespace, model: Any, tokenizer: Any, config: dict, texts: dict[str, list[str]]
) -> dict[str, list[list[float]]]:
    """Kind of prompt to one list of entropies (bits) for each prompt."""
    from rich.progress import Progress

    from ..cli import options
    from ..gears.observer import Observer

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
    from ..routing import calibration

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
    from ..cli import prompts

    files = {"mixed": (args.prompts, prompts.MIXED)}
    if args.method == "manual":
        files = {"trivial": (args.trivial, prompts.TRIVIAL), "hard": (args.hard, prompts.HARD)}
    return {
        kind: (prompts.read_prompts(Path(file)) if file else list(default))[: args.num_prompts]
        for kind, (file, default) in files.items()
    }


def made_gearbox(args: argparse.Namespace, model: Any, ladder: Any) -> Any:
    """Raises GearbxError for a model that has no gears."""
    from ..cli import gears as options_gears
    from ..errors import GearbxError
    from ..gears.gearbox import Gearbox

    gearbox = options_gears.make_gearbox(args, model, ladder)
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(f"{args.model} is quantized already and has no gears; give the original")
    return gearbox


def calibrate_kickdown(args: argparse.Namespace, ladder: Any, shares: list[float], out: Path) -> None:
    """Record every token's entropy in every gear on the way to the top one, and find thresholds by shares."""
    from rich.progress import Progress

    from ..cli import options
    from ..decoding.entropy_sampler import measured
    from ..decoding.kickdown import GearedModel
    from ..gears.discovery import vocabulary
    from ..loading import model_name
    from ..routing.calibration import kickdown_thresholds
    from ..routing.thresholds import ThresholdFile

    texts = chosen_prompts(args)["mixed"]
    model, tokenizer, config = options.load_model(args)
    geared = GearedModel(made_gearbox(args, model, ladder), rule=lambda entropy, position, gear: True)
    climbs: list[tuple[float, ...]] = []
    with Progress(console=terminal.messages, transient=True) as progress:
        for prompt in progress.track(texts, description="prompts"):
            tokens = options.encode_prompt(args, tokenizer, prompt)
            length = options.room_for(config, len(tokens), args.max_tokens)
            responses = measured(geared, tokenizer, tokens, lambda: geared.step, max_tokens=length)
            climbs += [reading.step.entropies for _, reading in responses]
    thresholds, reached = kickdown_thresholds(climbs, shares)
    content = ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocabulary(model),
        model=model_name(args.model),
        method="share",
        gears=[gear.bits for gear in ladder],
        tokens=len(climbs),
        window=1,
        hysteresis=0.0,
        min_gear_duration=1,
        shares=reached,
        mode="kickdown",
        fingerprint=geared.gearbox.fingerprint,
    )
    write_text(out, content.text())
    tell_shares(ladder, reached, content.tokens)
    print(f"{out}: {', '.join(f'{t:.3f}' for t in thresholds)} bits")


def calibrate_drafting(args: argparse.Namespace, ladders: list[Any], out: Path) -> None:
    """Record the gears of every ladder on the top gear's text, and write what reads the fewest bytes."""
    from mlx_lm import stream_generate
    from rich.progress import Progress

    from ..cli import options
    from ..decoding.agreement import draft_files, record_agreement
    from ..gears.ladder import DENSE, Ladder
    from ..gears.saved import saved_gears
    from ..loading import model_name

    texts = chosen_prompts(args)["mixed"]
    model, tokenizer, config = options.load_model(args)
    prompts = [options.encode_prompt(args, tokenizer, prompt) for prompt in texts]
    rooms = [options.room_for(config, len(prompt), args.max_tokens) for prompt in prompts]
    made: list[Any] = []
    with Progress(console=terminal.messages, transient=True) as progress:
        task = progress.add_task("ladders and prompts", total=len(ladders) * len(prompts))
        for ladder in ladders:
            bits = [gear.bits for gear in ladder]
            # The originals stay, whatever the top gear is: the next ladder is made from them.
            kept = bits if bits[-1] == DENSE or saved_gears(model) else [*bits, DENSE]
            gearbox = made_gearbox(args, model, Ladder(kept))
            top = gearbox.ladder.find(bits[-1])
            below = [gear for gear in gearbox.ladder if gear.bits < top.bits]
            gears = [gear for gear in below if gear.bits in DRAFT_BITS] or below
            recorded: dict[Any, list] = {gear: [] for gear in gears}
            for prompt, room in zip(prompts, rooms):
                gearbox.shift(top)
                text = [response.token for response in stream_generate(model, tokenizer, prompt, room)]
                for gear, agreement in zip(gears, record_agreement(gearbox, top, gears, prompt, text)):
                    recorded[gear].append(agreement)
                progress.advance(task)
            made += draft_files(gearbox, top, recorded, model_name(args.model), args.q_group_size, args.format)
            gearbox.shift(gearbox.ladder.top)
    best = min(made, key=lambda file: file.weight_bytes_per_token)
    terminal.messages.print(drafting_table(made, best))
    write_text(out, best.text())
    saved = best.weight_bytes_per_token_top / best.weight_bytes_per_token
    print(
        f"{out}: gears {','.join(map(str, best.gears))}, drafting in {best.draft} bits to a bound of {best.bound:g}, "
        f"{saved:.2f} times fewer bytes of weights than the top gear (predicted)"
    )


def drafting_table(made: list[Any], best: Any) -> Any:
    """What was compared, one line for each ladder and draft gear."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("gears", "draft", "agrees", "best length", "times fewer bytes", "bound", "times fewer bytes"):
        table.add_column(title, justify="left" if title == "gears" else "right")
    for file in made:
        table.add_row(
            ",".join(map(str, file.gears)) + (" *" if file is best else ""),
            f"{file.draft} bits",
            f"{file.agreement_overall:.1%}",
            str(file.best_fixed_length),
            f"{file.weight_bytes_per_token_top / file.fixed_weight_bytes_per_token:.2f}",
            f"{file.bound:g}",
            f"{file.weight_bytes_per_token_top / file.weight_bytes_per_token:.2f}",
        )
    return table


def tell_shares(ladder: Any, reached: list[float], tokens: int) -> None:
    shown = ", ".join(f"{gear.name} {share:.0%}" for gear, share in zip(ladder, reached))
    terminal.note(f"{tokens} tokens; with these thresholds the gate puts {shown} of them in each gear")


def run(args: argparse.Namespace) -> int:
    from ..cli import gears as options_gears
    from ..cli import options
    from ..errors import GearbxError
    from ..gears.gearbox import DEFAULT_LADDER
    from ..gears.ladder import Ladder
    from . import calibrate_target as target

    options.check_numbers(args)
    wish = target.wish_of(args)
    if wish:
        return target.run(args, wish, chosen_prompts(args)["mixed"])
    if args.mode != "route" and args.method != "share":
        raise GearbxError(f"--method {args.method} is for --mode route; leave it out")
    options_gears.settle_gears(args, None)
    texts_of_ladders = DRAFT_LADDERS[args.top] if args.mode == "lossless" else (DEFAULT_LADDER,)
    ladders = [Ladder.parse(text) for text in ([args.gears] if args.gears else texts_of_ladders)]
    ladder = ladders[0]
    if len(ladder) < 2:
        wanting = "nothing to draft with" if args.mode == "lossless" else "no thresholds"
        raise GearbxError(f"--gears {ladder}: one gear has {wanting}; give two or more")
    out = options.output_path(args.out or OUT[args.mode])
    if args.mode == "lossless":
        calibrate_drafting(args, ladders, out)
        return 0
    shares = parse_shares(args.shares, len(ladder))
    if args.mode == "kickdown":
        calibrate_kickdown(args, ladder, shares, out)
        return 0
    routing = options.gate_settings(args)
    texts = chosen_prompts(args)
    args.gears = str(ladder)

    from ..gears.discovery import vocabulary
    from ..loading import model_name
    from ..routing.calibration import reached_shares
    from ..routing.thresholds import ThresholdFile

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
    tell_shares(ladder, reached, content.tokens)
    print(f"{out}: {', '.join(f'{t:.3f}' for t in thresholds)} bits")
    return 0


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))
