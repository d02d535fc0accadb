"""python -m gearbx_mlx.evaluate: what shifting buys, against chance and against the static gears."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import terminal
from ..files.writing import write_text
from ..telemetry.summary import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..gears.gearbox import Gearbox
    from ..gears.ladder import Gear, Ladder

POLICIES = ("static", "random", "route", "kickdown", "inverted", "position", "oracle", "lossless", "lossless-fixed")
WRITING = ("static", "route", "kickdown", "lossless")  # that can write a text of their own
FILES = ("evaluation.json", "evaluation.md", "evaluation.png")
SHOWN = (  # what fits into 80 characters
    "policy",
    "share",
    "kB/token",
    "KL mean",
    "agreement",
    "vs chance",
    "better static",
)
DEFAULT_CONTEXT, DEFAULT_TOKENS, DEFAULT_ANSWER = 256, 2000, 256


def setup_arg_parser() -> argparse.ArgumentParser:
    from ..cli import gears as options_gears
    from ..cli import options
    from ..cli import pair as pairing

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.evaluate",
        description="Read a text under several policies, one token at a time on a KV cache, and compare each token's "
        "distribution with the top gear's. An interrupted run goes on when the command is given again.",
    )
    options.add_model_flags(parser)
    options_gears.add_gear_flags(parser)
    parser.set_defaults(telemetry_only=False)
    options.add_gate_flags(parser)
    pairing.add_sweep_flags(parser)
    group = parser.add_argument_group("evaluation")
    group.add_argument("--data", required=True, help="A text, or JSON Lines with text, or question and answer (GSM8K).")
    group.add_argument("--out", default="evaluation", help="Directory for the report. Default: evaluation")
    group.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
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
    options.add_prompt_flags(parser)
    parser.set_defaults(max_tokens=DEFAULT_ANSWER)
    free = parser.add_argument_group("task gsm8k: the model writes, greedily, and its final number is right or wrong")
    free.add_argument("--task", choices=["text", "gsm8k"], default="text", help="Default: text")
    free.add_argument("--num-problems", type=int, default=50, help="Default: 50")
    free.add_argument(
        "--num-shots", type=int, default=0, help="First problems of the file, shown as examples. Default: 0"
    )
    free.add_argument(
        "--thresholds",
        metavar="FILE|BITS",
        help="For route and kickdown; with --small-model, for both tasks, a sweep: inf,1,0.5,0. Default: the papers'",
    )
    return parser


def parse_shares(text: str) -> list[float]:
    """Raises GearbxError unless they are parts of 1."""
    from ..errors import GearbxError

    try:
        shares = sorted({float(part) for part in text.split(",")})
    except ValueError as error:
        raise GearbxError(f"--share '{text}' are not numbers with commas between, such as 0.25,0.5") from error
    if not all(0 < share < 1 for share in shares):
        raise GearbxError(f"--share '{text}': give parts of 1, more than 0 and less than 1")
    return shares


def parse_between(text: str | None, ladder: "Ladder") -> "tuple[Gear, Gear]":
    """Raises GearbxError unless two gears of the ladder are named, the lower one first."""
    from ..errors import GearbxError

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
    from ..errors import GearbxError
    from ..loading import context_length

    longest = context_length(config)
    if args.context is None:
        return min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest and args.context > longest:
        raise GearbxError(f"--context is {args.context}, and the model was made for {longest}; give at most that")
    return args.context


def inputs_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """All that results depend on, the flags of these names among it."""
    from importlib.metadata import version

    from ..bit_selection.floors import wanted_floors
    from ..evaluation.session import fingerprint
    from ..loading import DEMO_MODEL, find

    directory = find(args.model or DEMO_MODEL)
    files = [file for pattern in ("*.safetensors", "*.json") for file in directory.glob(pattern)]
    common = ("task", "gears", "format", "manage", "q_group_size", "kernels", "activations", "dtype", "adapter_path")
    return {
        "model contents": fingerprint(*files),
        "data contents": fingerprint(Path(args.data)),
        **{name: getattr(args, name) for name in (*common, *names)},
        **({"floors": vars(floors)} if (floors := wanted_floors(args)) else {}),
        **({"manifest contents": fingerprint(Path(args.manifest))} if args.manifest else {}),
        "gearbx_mlx": version("gearbx-mlx"),
        "mlx": version("mlx"),
    }


def draw_if_possible(report: dict[str, Any], path: Path) -> list[Path]:
    """The picture, where matplotlib is installed."""
    from ..errors import GearbxError
    from ..evaluation.picture import draw

    try:
        draw(report, path)
    except GearbxError as error:
        terminal.note(f"no picture: {error}")
        return []
    return [path]


def table_of(report: dict[str, Any], columns: "Mapping[str, Callable[[Any], str]]", shown: "Iterable[str]") -> Any:
    """The rows of a report in the terminal, in the columns that are shown."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(name, no_wrap=True)
    for row in report["policies"]:
        table.add_row(*(columns[name](row) for name in shown))
    return table


def load_geared(args: argparse.Namespace, ladder: "Ladder") -> "tuple[Gearbox, Any, dict]":
    """The model in its gearbox, its tokenizer and its configuration.

    Raises:
        GearbxError: a model that has no gears.
    """
    from ..cli import gears as options_gears
    from ..cli import options
    from ..errors import GearbxError
    from ..gears.gearbox import Gearbox
    from ..loading import model_name

    model, tokenizer, config = options.load_model(args)
    gearbox = options_gears.make_gearbox(args, model, ladder)
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(
            f"{model_name(args.model)}: is quantized already, so that no gear can be compared with the original; "
            "give the model that it was made from"
        )
    return gearbox, tokenizer, config


def progress_bar() -> Any:
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=terminal.messages, transient=True)


def told_by(args: argparse.Namespace, gearbox: "Gearbox", status: int) -> dict[str, Any]:
    """What a report says of how it was made."""
    from ..loading import model_name

    return {
        "model": model_name(args.model),
        "data": args.data,
        "complete": status == 0,
        "format": args.format,
        "manage": args.manage,
        "group_size": args.q_group_size,
        "kernels": "native" if gearbox.kernels.native else "mlx",
    }


def run_text(args: argparse.Namespace, ladder: "Ladder") -> int:
    """Teacher-forced along a text."""
    from ..cli import options
    from ..evaluation.text import read_documents, windows_of

    gate, shares = options.gate_settings(args), parse_shares(args.share)
    between = parse_between(args.between, ladder)
    documents, out = read_documents(Path(args.data)), Path(args.out)

    from ..evaluation.plans import entries
    from ..evaluation.report import COLUMNS, markdown
    from ..evaluation.runs import Runs
    from ..evaluation.session import Session

    gearbox, tokenizer, config = load_geared(args, ladder)
    args.context = context_of(args, config)
    windows = windows_of(tokenizer, documents, args.context, args.tokens, args.data)
    named = ("context", "tokens", "seed", "reference_dtype", *gate)
    # Shares and policies are not among the inputs: a report may be extended.
    session = Session(out, inputs_of(args, *named) | {"between": [gear.bits for gear in between], **gate})
    runs = Runs(session, gearbox, windows, between, gate, args.seed, args.reference_dtype)
    status = 0
    with progress_bar() as progress:
        runs.track = lambda steps, total, name: progress.track(steps, total, description=name)
        try:
            runs.compute(entries(args.policy or POLICIES, shares, ladder))
        except KeyboardInterrupt:
            status = terminal.INTERRUPTED
    if not runs.recordings:
        terminal.note(f"{out}: no policy is finished; the same command goes on")
        return status
    report = runs.report({**told_by(args, gearbox, status), "context": args.context})
    write_text(out / FILES[0], as_json(report))
    write_text(out / FILES[1], markdown(report))
    terminal.messages.print(table_of(report, COLUMNS, SHOWN))
    for path in (out / FILES[0], out / FILES[1], *draw_if_possible(report, out / FILES[2])):
        print(path)
    return status


def problems_of(args: argparse.Namespace) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Examples and problems of a GSM8K file.

    Raises:
        GearbxError: as read_rows, or nothing left but examples.
    """
    from ..errors import GearbxError
    from ..evaluation.text import read_rows

    rows = read_rows(Path(args.data), ("question", "answer"))
    examples, problems = rows[: args.num_shots], rows[args.num_shots :][: args.num_problems]
    if not problems:
        raise GearbxError(f"{args.data}: has {len(rows)} problems, all of them examples; give fewer --num-shots")
    return examples, problems


def prompts_of(
    args: argparse.Namespace,
    tokenizer: Any,
    config: dict,
    examples: list[dict[str, str]],
    problems: list[dict[str, str]],
) -> list[tuple[list[int], int, str]]:
    """Tokens of each problem's prompt, how many may be written after it, and the worked answer."""
    from ..cli import options
    from ..evaluation import gsm8k

    templated = tokenizer.has_chat_template and not args.ignore_chat_template
    texts = [row["question"] if templated and not examples else gsm8k.prompt_of(row, examples) for row in problems]
    tokens = [options.encode_prompt(args, tokenizer, text) for text in texts]
    lengths = [options.room_for(config, len(prompt), args.max_tokens) for prompt in tokens]
    return list(zip(tokens, lengths, (row["answer"] for row in problems)))


def run_gsm8k(args: argparse.Namespace, ladder: "Ladder") -> int:
    """Free-running, by final numbers."""
    from ..cli import options
    from ..errors import GearbxError

    (examples, problems), out = problems_of(args), Path(args.out)
    unknown = [policy for policy in args.policy or () if policy not in WRITING]
    if unknown:
        raise GearbxError(f"--policy {unknown[0]}: needs a text to follow; task gsm8k has {', '.join(WRITING)}")

    from functools import partial

    from ..evaluation import gsm8k
    from ..evaluation.session import Session

    gearbox, tokenizer, config = load_geared(args, ladder)
    routing = options.make_routing(args, ladder, gearbox.model)
    named = ("num_problems", "num_shots", "max_tokens")
    session = Session(out, inputs_of(args, *named) | vars(routing))
    prompts = prompts_of(args, tokenizer, config, examples, problems)
    attempts: dict[str, list[gsm8k.Attempt]] = {}
    status = 0
    with progress_bar() as progress:
        try:
            for name, keywords in gsm8k.ways_to_write(args.policy or WRITING, ladder, vars(routing)).items():
                shown = progress.track(prompts, description=name)
                solve = partial(gsm8k.solve, gearbox, tokenizer, shown, **keywords)
                attempts[name] = session.rows(name, solve, gsm8k.Attempt, len(prompts))
        except KeyboardInterrupt:
            status = terminal.INTERRUPTED
    if not attempts:
        terminal.note(f"{out}: no policy is finished; the same command goes on")
        return status
    reference = next(iter(attempts))
    report = told_by(args, gearbox, status) | {"reference": reference, "policies": gsm8k.score(attempts, reference)}
    write_text(out / FILES[0], as_json(report))
    write_text(out / FILES[1], gsm8k.markdown(report))
    terminal.messages.print(table_of(report, gsm8k.COLUMNS, gsm8k.COLUMNS))
    for path in (out / FILES[0], out / FILES[1]):
        print(path)
    return status


def run_pair(args: argparse.Namespace) -> int:
    """EAD's Table 1: along a text, or writing."""
    from ..cli import pair as pairing
    from ..errors import GearbxError
    from ..evaluation.text import answer_windows, read_documents, read_rows, windows_of
    from . import evaluate_pair

    if args.policy or args.between:
        raise GearbxError("--policy and --between are of one model in gears; leave them out with --small-model")
    turns = pairing.turns_of(args, several=True)
    if args.task == "gsm8k":
        examples, problems = problems_of(args)
        models = pairing.load_pair(args)
        prompts = prompts_of(args, models.tokenizer, models.config, examples, problems)
        with progress_bar() as progress:
            return evaluate_pair.run_gsm8k(args, turns, models, prompts, progress)
    rows = read_rows(Path(args.data), ("question", "answer")) if args.answers_only else []
    documents = [] if rows else read_documents(Path(args.data))
    models = pairing.load_pair(args)
    args.context = context_of(args, models.config)
    if rows:
        windows = answer_windows(models.tokenizer, rows, args.context, args.tokens)
    else:
        texts = windows_of(models.tokenizer, documents, args.context, args.tokens, args.data)
        windows = [(window, 0) for window in texts]
    with progress_bar() as progress:
        return evaluate_pair.run_text(args, turns, models, windows, progress)


RUN = {"text": run_text, "gsm8k": run_gsm8k}


def run(args: argparse.Namespace) -> int:
    from ..cli import gears as options_gears
    from ..cli import options
    from ..gears.ladder import Ladder

    options_gears.settle_gears(args)
    ladder = Ladder.parse(args.gears)
    options.check_numbers(args)
    if args.small_model is not None:
        return run_pair(args)
    return RUN[args.task](args, ladder)


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))
