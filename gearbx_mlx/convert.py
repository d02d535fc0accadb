"""python -m gearbx_mlx.convert: from a model to a geared checkpoint, which stock mlx-lm reads too."""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from . import terminal

if TYPE_CHECKING:
    from .gears.converter import Converter, Plan
    from .gears.manifest import Manifest

REPORT = "selection.json"  # which bits every layer got, and why
INCOMPLETE = ".incomplete"  # behind the name of a directory that is not whole yet


def setup_arg_parser() -> argparse.ArgumentParser:
    from . import fitting, floors, options_gears
    from .gears.activations import DTYPES

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.convert",
        description="Write a checkpoint that holds several gears, and that mlx-lm reads as a 4-bit model where the "
        "format is planes or affine. An interrupted run goes on when the command is given again.",
    )
    parser.add_argument(
        "--hf-path", "--model", dest="model", help="Local directory or Hub repository. Default: the model that ships."
    )
    parser.add_argument("--mlx-path", default="mlx_model", help="Path to save the MLX model. Default: mlx_model")
    parser.add_argument("--revision", help="Of a Hub repository: a branch, a tag or a commit.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Enable trusting remote code for tokenizer")
    parser.add_argument("--dtype", choices=list(DTYPES), help="Type to save the original weights in. Default: theirs")
    parser.add_argument("--upload-repo", help="The Hugging Face repo to upload the model to.")
    options_gears.add_ladder_flags(parser)
    group = parser.add_argument_group("gearbox")
    options_gears.add_format_flags(group)
    group.add_argument(
        "--manifest",
        metavar="FILE",
        help="From gearbx_mlx.allocate: write no gears, but the table of one (--gears 4) as a checkpoint of mlx-lm's "
        "own, every layer at its bits.",
    )
    floors.add_floor_flags(parser)
    fitting.add_budget_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    from . import options_gears
    from .errors import GearbxError
    from .gears.ladder import Ladder
    from .loading import DEMO_MODEL, find, gears_of

    if args.gears is not None:
        Ladder.parse(args.gears)
    if args.manifest is not None and (args.dtype or args.manage):
        raise GearbxError("--manifest says of which layers and weights; leave out --dtype and --manage")
    out = Path(args.mlx_path).expanduser()
    work = out.with_name(out.name + INCOMPLETE)
    if os.path.exists(out):  # Path.exists raises OSError for a name that is too long
        raise GearbxError(f"--mlx-path {out}: is there already; remove it or give another path")
    if not os.path.isdir(out.parent):
        raise GearbxError(f"--mlx-path {out}: there is no directory {out.parent}; make it first")
    source = find(args.model or DEMO_MODEL, args.revision)
    if gears_of(source) is not None:
        raise GearbxError(f"{source}: holds gears already; convert the original")
    if args.manifest is not None:
        return run_static(args, source, work, out)
    options_gears.settle_gears(args)
    wish = wish_of(args)
    ladder = Ladder.parse(args.gears)
    gears = tuple(gear.bits for gear in ladder)
    if not ladder.quantized_bits:
        raise GearbxError(f"--gears {ladder}: nothing to convert; give a gear of fewer bits")
    try:
        manifest = convert(args, source, gears, work, wish)
        os.replace(work, out)
    except OSError as error:
        raise GearbxError(
            f"{work}: cannot be written ({error.strerror or error}); mend that, and the same command goes on from there"
        ) from error
    tell(out, manifest)
    if args.upload_repo is not None:
        upload(out, args.model, args.upload_repo)
    return 0


def run_static(args: argparse.Namespace, source: Path, work: Path, out: Path) -> int:
    """One table of a precision manifest, for mlx-lm."""
    from . import static
    from .errors import GearbxError
    from .fitting import wanted_budget
    from .floors import wanted_floors

    if args.memory_budget is not None or args.target_bpw is not None or wanted_floors(args) or wanted_budget(args):
        raise GearbxError("--manifest has the bits of every layer; leave out the floors and the budget")
    try:
        static.convert(args, source, work)
        os.replace(work, out)
    except OSError as error:
        raise GearbxError(f"{work}: cannot be written ({error.strerror or error}); mend that, and try again") from error
    print(out)
    if args.upload_repo is not None:
        upload(out, args.model, args.upload_repo)
    return 0


def wish_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the bits of every layer are to follow from: floors or a budget."""
    from .errors import GearbxError
    from .fitting import wanted_budget
    from .floors import wanted_floors
    from .gears.ladder import Ladder

    budget = wanted_budget(args)
    if budget and Ladder.parse(args.gears)[0].bits != 2:
        raise GearbxError(
            f"--gears {args.gears}: a budget finds the bits of a gear that begins at 2; leave out --gears"
        )
    floors = None if budget else wanted_floors(args)
    return budget or (vars(floors) if floors else None)


def convert(
    args: argparse.Namespace, source: Path, gears: tuple[int, ...], work: Path, wish: dict[str, Any] | None
) -> "Manifest":
    """Fill the directory `work`, from the beginning or from where it stopped."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from .errors import GearbxError
    from .gears.converter import Converter, Plan
    from .gears.discovery import is_quantized
    from .gears.tensor_entries import hash_of
    from .loading import load, one_line

    trust: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    model, _ = load(source, lazy=True, tokenizer_config=dict(trust), **trust)
    if is_quantized(model):
        raise GearbxError(f"{source}: is quantized already; convert the original")
    if args.dtype is not None:
        cast(model, args.dtype)
    hashes = {file.name: hash_of(file) for file in sorted(source.glob("model*.safetensors"))}
    plan = Plan(args.format, gears, args.manage, args.q_group_size, args.dtype, hashes, wish)
    if wish:
        plan = structs.replace(plan, bits=bits_for(args, source, trust, plan, work))
    converter = Converter(model, plan, work)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns, console=terminal.messages, transient=True) as progress:
            task = progress.add_task("converting", total=converter.size)
            for size in converter:
                progress.advance(task, size)
        manifest = converter.finish()
    except RuntimeError as error:  # of MLX, reading what is not there any more
        raise GearbxError(f"{source}: cannot be read ({one_line(error)}); download it again") from error
    finally:
        converter.close()
    copy_others(source, work, converter)
    return manifest


def bits_for(args: argparse.Namespace, source: Path, trust: dict[str, Any], plan: "Plan", work: Path) -> dict[str, int]:
    """Path to bits: what an earlier run found, or floors that are given or found; the report beside the checkpoint."""
    from .files.writing import write_text
    from .fitting import fit, point_rows, points_table
    from .floors import Floors, select_bits, selection_lines
    from .gears.converter import read_journal
    from .gears.selection_report import as_dict
    from .loading import load
    from .telemetry.summary import as_json

    earlier, _, _ = read_journal(work)
    if earlier is not None and earlier.bits is not None and structs.replace(earlier, bits=None) == plan:
        return dict(earlier.bits)
    wish = dict(plan.wish or {})
    of_budget = "memory_budget" in wish
    model, tokenizer = load(source, lazy=not of_budget, tokenizer_config=dict(trust), **trust)
    if args.dtype is not None:
        cast(model, args.dtype)
    report: dict[str, Any] = {}
    if of_budget:
        found = fit(model, tokenizer, args.format, args.manage, wish)
        terminal.messages.print(points_table(found))
        selection, report["points"] = found.best.selection, point_rows(found)
    else:
        selection = select_bits(model, args.format, args.manage, Floors(**wish), give_up=True)
    for line in selection_lines(selection):
        terminal.note(line)
    if earlier is None:
        work.mkdir(parents=True, exist_ok=True)
        write_text(work / REPORT, as_json(as_dict(selection) | report))
    return dict(selection.bits)


def cast(model: Any, dtype: str) -> None:
    """Put floating parameters into another type, as mlx_lm.convert does; nothing is read."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    from .gears.activations import DTYPES

    wanted = getattr(model, "cast_predicate", lambda name: True)

    def put_into(name: str, array: mx.array) -> mx.array:
        return array.astype(DTYPES[dtype]) if wanted(name) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(put_into, model.parameters()))


def copy_others(source: Path, work: Path, converter: "Converter") -> None:
    """Tokenizer and code as they are, and a config.json that says how the base is quantized; the journal has done."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    from .gears.converter import JOURNAL
    from .loading import read_config

    ours = {"config.json", *(file.name for file in work.iterdir())}
    for pattern in DEFAULT_ALLOW_PATTERNS:
        for file in source.glob(pattern):
            if file.name not in ours and not file.name.endswith((".safetensors", ".safetensors.index.json")):
                shutil.copyfile(file, work / file.name)
    config = read_config(source)
    quantization = converter.quantization()
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    (work / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    (work / JOURNAL).unlink()


def tell(out: Path, manifest: "Manifest") -> None:
    """What was made, and its sizes."""
    from .gears.converter import BASE_FILE
    from .gears.manifest import GEARS_FILE

    base, gears = ((out / name).stat().st_size for name in (BASE_FILE, GEARS_FILE))
    told = "which mlx-lm runs" if manifest.stock else "which mlx-lm does not run: it has no gear of its own formats"
    terminal.note(f"base {terminal.human_bytes(base)}, {told}; other gears {terminal.human_bytes(gears)}")
    print(out)


def upload(out: Path, source: str | None, repo: str) -> None:
    from mlx_lm.utils import create_model_card, upload_to_hub

    from .errors import GearbxError
    from .loading import one_line

    try:
        create_model_card(out, None if source is None or Path(source).exists() else source)
        upload_to_hub(out, repo)
    except Exception as error:  # the network, the Hub, a token that may not
        raise GearbxError(
            f"{out}: is whole, and was not uploaded ({one_line(error)}); hf upload {repo} {out} goes on"
        ) from error


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))


if __name__ == "__main__":
    main()
