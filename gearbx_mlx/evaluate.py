"""python -m gearbx_mlx.evaluate: what shifting buys, against chance and against the static gears."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import terminal
from .telemetry.files import write_text
from .telemetry.summary import as_json

if TYPE_CHECKING:
    from .gears.ladder import Gear, Ladder

POLICIES = ("static", "random", "route", "kickdown", "inverted", "position", "oracle")
FILES = ("evaluation.json", "evaluation.md", "evaluation.png")
SHOWN = ("policy", "share", "kB/token", "KL mean", "agreement", "vs chance", "better static")
DEFAULT_CONTEXT, DEFAULT_TOKENS = 256, 2000


def setup_arg_parser() -> argparse.ArgumentParser:
    from . import options

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.evaluate",
        description="Read a text under several policies, one token at a time on a KV cache, and compare each token's "
        "distribution with the top gear's. An interrupted run goes on when the command is given again.",
    )
    options.add_model_flags(parser)
    options.add_gear_flags(parser)
    parser.set_defaults(telemetry_only=False)
    options.add_gate_flags(parser)
    group = parser.add_argument_group("evaluation")
    group.add_argument("--data", required=True, help="A text, or JSON Lines with text, or question and answer (GSM8K).")
    group.add_argument("--out", default="evaluation", help="Directory for the report. Default: evaluation")
    group.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
        default=POLICIES,
        help="Every report holds static and random besides. Default: all",
    )
    group.add_argument("--share", default="0.25,0.5", help="Shares of tokens in the higher gear. Default: 0.25,0.5")
    group.add_argument("--between", metavar="LOW,HIGH", help="The two gears. Default: the lowest and the top gear")
    group.add_argument("--context", type=int, help=f"Tokens in a window. Default: {DEFAULT_CONTEXT}, or the model's")
    group.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, help=f"Predictions in all. Default: {DEFAULT_TOKENS}"
    )
    group.add_argument("--seed", type=int, default=0, help="Of the random gate and of the noise. Default: 0")
    group.add_argument(
        "--reference-dtype",
        choices=["float32", "float16"],
        default="float32",
        help="In which the top gear's log-probabilities are kept on disk. Default: float32",
    )
    return parser


def parse_shares(text: str) -> list[float]:
    """Raises GearbxError unless they are parts of 1."""
    from .errors import GearbxError

    try:
        shares = sorted({float(part) for part in text.split(",")})
    except ValueError as error:
        raise GearbxError(f"--share '{text}' are not numbers with commas between, such as 0.25,0.5") from error
    if not all(0 < share < 1 for share in shares):
        raise GearbxError(f"--share '{text}': give parts of 1, more than 0 and less than 1")
    return shares


def parse_between(text: str | None, ladder: "Ladder") -> "tuple[Gear, Gear]":
    """Raises GearbxError unless two gears of the ladder are named, the lower one first."""
    from .errors import GearbxError

    if len(ladder) < 2:
        raise GearbxError(f"--gears {ladder}: one gear has nothing to be compared with; give two or more")
    if text is None:
        return ladder[0], ladder.top
    gears = [ladder.find(part.strip()) for part in text.split(",")]
    if len(gears) != 2 or gears[0].index >= gears[1].index:
        raise GearbxError(f"--between '{text}': give two gears, the lower one first, such as {ladder[0].bits},8")
    return gears[0], gears[1]


def context_of(args: argparse.Namespace, config: dict) -> int:
    """Raises GearbxError for more than the model was made for."""
    from .errors import GearbxError
    from .loading import context_length

    longest = context_length(config)
    if args.context is None:
        return min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest and args.context > longest:
        raise GearbxError(f"--context is {args.context}, and the model was made for {longest}; give at most that")
    return args.context


def inputs_of(args: argparse.Namespace, context: int, gate: dict[str, Any], between: list[int]) -> dict[str, Any]:
    """All that the recordings depend on. Shares and policies are not among it: a report may be extended."""
    from importlib.metadata import version

    from .evaluation.session import fingerprint
    from .loading import DEMO_MODEL, find

    directory = find(args.model or DEMO_MODEL)
    files = [file for pattern in ("*.safetensors", "*.json") for file in directory.glob(pattern)]
    named = ("gears", "format", "manage", "q_group_size", "kernels", "dtype", "tokens", "seed", "reference_dtype")
    return {
        "model contents": fingerprint(*files),
        "adapter": args.adapter_path,
        "data contents": fingerprint(Path(args.data)),
        "context": context,
        "between": between,
        **{name: getattr(args, name) for name in named},
        **gate,
        "gearbx_mlx": version("gearbx-mlx"),
        "mlx": version("mlx"),
    }


def draw_if_possible(report: dict[str, Any], path: Path) -> list[Path]:
    """The picture, where matplotlib is installed."""
    from .errors import GearbxError
    from .evaluation.picture import draw

    try:
        draw(report, path)
    except GearbxError as error:
        terminal.note(f"no picture: {error}")
        return []
    return [path]


def table_of(report: dict[str, Any]) -> Any:
    """The rows in the terminal, without the columns that do not fit into 80 characters."""
    from rich import box
    from rich.table import Table

    from .evaluation.report import COLUMNS

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in SHOWN:
        table.add_column(name, no_wrap=True)
    for row in report["policies"]:
        table.add_row(*(COLUMNS[name](row) for name in SHOWN))
    return table


def run(args: argparse.Namespace) -> int:
    from . import options
    from .errors import GearbxError
    from .evaluation.text import read_documents
    from .gears.ladder import Ladder

    ladder = Ladder.parse(args.gears)
    options.check_numbers(args)
    gate, shares = options.gate_settings(args), parse_shares(args.share)
    between = parse_between(args.between, ladder)
    documents = read_documents(Path(args.data))
    out = Path(args.out)

    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from .evaluation.plans import entries
    from .evaluation.report import markdown
    from .evaluation.runs import Runs
    from .evaluation.session import Session
    from .evaluation.text import windows_of
    from .gears.gearbox import Gearbox
    from .loading import model_name

    model, tokenizer, config = options.load_model(args)
    context = context_of(args, config)
    windows = windows_of(tokenizer, documents, context, args.tokens, args.data)
    gearbox = options.make_gearbox(args, model, ladder)
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(
            f"{model_name(args.model)}: is quantized already, so that no gear can be compared with the "
            "original; give the model that it was made from"
        )
    session = Session(out, inputs_of(args, context, gate, [gear.bits for gear in between]))
    runs = Runs(session, gearbox, windows, between, gate, args.seed, args.reference_dtype)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    status = 0
    with Progress(*columns, console=terminal.messages, transient=True) as progress:
        runs.track = lambda steps, total, name: progress.track(steps, total, description=name)
        try:
            runs.compute(entries(args.policy, shares, ladder))
        except KeyboardInterrupt:
            status = terminal.INTERRUPTED
    if not runs.recordings:
        terminal.note(f"{out}: no policy is finished; the same command goes on")
        return status
    report = runs.report(
        {
            "model": model_name(args.model),
            "data": args.data,
            "complete": status == 0,
            "context": context,
            "format": args.format,
            "manage": args.manage,
            "group_size": args.q_group_size,
            "kernels": "native" if gearbox.kernels.native else "mlx",
        }
    )
    write_text(out / FILES[0], as_json(report))
    write_text(out / FILES[1], markdown(report))
    terminal.messages.print(table_of(report))
    for path in (out / FILES[0], out / FILES[1], *draw_if_possible(report, out / FILES[2])):
        print(path)
    return status


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))


if __name__ == "__main__":
    main()
