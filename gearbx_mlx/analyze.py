"""python -m gearbx_mlx.analyze: which gears a file of prompts would use, without changing the model."""

import argparse
from pathlib import Path

from . import terminal
from .files.writing import check_directory, make_directory, write_text
from .telemetry.report import PICTURES
from .telemetry.summary import Tally, as_json
from .telemetry.trace import TraceWriter, record

FILES = ("trace.jsonl", "summary.json", *PICTURES)


def setup_arg_parser() -> argparse.ArgumentParser:
    from . import options, options_gears

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.analyze",
        description="Run prompts with telemetry only: every token is recorded, no layer changes gear.",
    )
    options.add_model_flags(parser)
    options.add_prompt_flags(parser)
    parser.set_defaults(max_tokens=options.DEFAULT_MAX_TOKENS)
    parser.add_argument("--prompts", required=True, help="One prompt per line, or JSON Lines as of GSM8K.")
    parser.add_argument("--num-prompts", type=int, help="Only the first so many prompts.")
    parser.add_argument(
        "--out", default="analysis", help="Directory for trace, summary and pictures. Default: analysis"
    )
    options_gears.add_ladder_flags(parser)
    options.add_routing_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    from . import options, options_gears
    from .gears.ladder import Ladder
    from .prompts import read_prompts
    from .telemetry.report import draw_report, get_pyplot

    options_gears.settle_gears(args)
    ladder = Ladder.parse(args.gears)
    options.check_numbers(args)
    options.check_routing(args, ladder)
    prompts = read_prompts(Path(args.prompts))[: args.num_prompts]
    out = Path(args.out)
    check_directory(out)
    get_pyplot()
    if out.is_dir():
        for name in FILES:
            options.output_path(out / name)

    import mlx.core as mx
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from .decoding.stream import TELEMETRY_ONLY, stream_generate
    from .gears.observer import Observer
    from .loading import model_name
    from .results import Speed, summary_of

    model, tokenizer, config = options.load_model(args)
    routing = options.make_routing(args, ladder, model)
    encoded = [options.encode_prompt(args, tokenizer, prompt) for prompt in prompts]
    lengths = [options.room_for(config, len(tokens), args.max_tokens) for tokens in encoded]
    observer = Observer(model, ladder, dtype=args.dtype)
    make_directory(out)
    trace_path, summary_path = (options.output_path(out / name) for name in FILES[:2])

    names = [gear.name for gear in ladder]
    tally, speed, records = Tally.of(names), Speed(), []
    status = 0
    mx.reset_peak_memory()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with TraceWriter(trace_path) as writer, Progress(*columns, console=terminal.messages) as progress:
            for number, tokens in enumerate(progress.track(encoded, description="prompts")):
                last = None
                for index, response in enumerate(
                    stream_generate(
                        model,
                        tokenizer,
                        tokens,
                        lengths[number],
                        gearbox=observer,
                        initial_gear=options.initial_gear(args, ladder, prompts[number]),
                        **vars(routing),
                    )
                ):
                    records.append(record(index, response, {"prompt": number}))
                    writer.write(records[-1])
                    tally.add(response)
                    last = response
                speed.add(last)
    except KeyboardInterrupt:
        status = terminal.INTERRUPTED

    result = summary_of(model_name(args.model), observer, TELEMETRY_ONLY, tally, speed, mx.get_peak_memory())
    result |= {"prompts": len({entry["prompt"] for entry in records}), "thresholds": list(routing.thresholds)}
    write_text(summary_path, as_json(result))
    pictures = draw_report(records, names, routing.thresholds, out) if records else []
    terminal.messages.print(terminal.summary_table(result))
    terminal.messages.print()
    for path in (trace_path, summary_path, *pictures):
        print(path)
    return status


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))


if __name__ == "__main__":
    main()
