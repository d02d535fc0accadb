"""Time gears and llama.cpp side by side, in turn within one run.

    pip install llama-cpp-python gguf
    python scripts/compare_llama_cpp.py [--page docs/performance.md]

Subjects:

    decode    tokens of a random Llama after contexts of several lengths
    prompt    512 tokens of the same Llama, up to the first one of the answer
    lossless  real texts by the demo model, widened as in time_lossless.py: mode lossless beside llama.cpp's speculative
              decoding with q4_0 of the same model as its draft model

The models become GGUF files in f16, q8_0 and q4_0 in a temporary directory, with the rows of queries and keys in the
order that llama.cpp rotates. So both sides write the same texts, up to rounding; the script checks that in float32.
Both sides have as many threads (GEARBX_THREADS, or one per core). llama.cpp keeps keys and values in 16 bits, we in 32.
Nothing else may run meanwhile: llama.cpp's threads wait for each other without sleeping.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beside_llama_cpp.rounds import Rounds
from beside_llama_cpp.tables import COLUMNS, table_of
from pages import fill

from gearbx_mlx.benchmark import parse_shape
from gearbx_mlx.cli.terminal import progress_bar, run
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.kernels import ACTIVATIONS
from gearbx_mlx.telemetry.summary import as_json

HELD_OUT = Path(__file__).parents[1] / "tests" / "data" / "gsm8k_held_out.jsonl"
POWERS = (1, 2, 4, 8, 16)


def whole(least: int) -> Callable[[str], int]:
    """A parser of numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parse


def names(choices: Any) -> Callable[[str], str]:
    """A parser of one of some names."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return parse


def several(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of values between commas, each once."""
    return lambda text: list(dict.fromkeys(parse(part) for part in text.split(",")))


def shape(text: str) -> str:
    try:
        parse_shape(text)
    except GearbxError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file")
    return Path(text)


def file_to_write(text: str) -> Path:
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a directory that exists")
    return Path(text)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--subjects", type=several(names(COLUMNS)), default=[*COLUMNS], help=f"Default: {','.join(COLUMNS)}"
    )
    parser.add_argument("--shape", type=shape, default="1024x24", help="WIDTHxLAYERS. Default: 1024x24")
    parser.add_argument("--contexts", type=several(whole(0)), default=[1, 1000, 4000], help="Default: 1,1000,4000")
    parser.add_argument("--tokens", type=whole(1), default=16, help="Decoded in a trial. Default: 16")
    parser.add_argument(
        "--activations",
        type=several(names(ACTIVATIONS)),
        default=["int16", "int8"],
        help="Of our gears, each in turn. Default: int16,int8",
    )
    parser.add_argument(
        "--times", type=int, choices=POWERS, default=8, help="Copies of every unit of the demo model. Default: 8"
    )
    parser.add_argument("--prompts", type=file, default=HELD_OUT, help="One per line, or JSON Lines. Default: GSM8K's")
    parser.add_argument("--num-prompts", type=whole(1), default=4, help="Default: 4")
    parser.add_argument("--max-tokens", type=whole(2), default=48, help="Of a text. Default: 48")
    parser.add_argument(
        "--draft-lengths",
        type=several(whole(1)),
        default=[3, 8],
        help="llama.cpp's; its own default is 3. Default: 3,8",
    )
    parser.add_argument("--trials", type=whole(1), default=5, help="Default: 5")
    parser.add_argument("--json", metavar="FILE", type=file_to_write)
    parser.add_argument("--page", metavar="FILE", type=file, help="Where to write the tables.")
    return parser


def versions() -> dict[str, str]:
    """Raises GearbxError where a package is missing."""
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        raise GearbxError(f"{error.name} is not installed: pip install llama-cpp-python gguf") from error
    return {"llama_cpp_python": llama_cpp.__version__}


def measure(args: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """The rows of each subject, and the number of threads."""
    from beside_llama_cpp.drafting import lossless_rows
    from beside_llama_cpp.random_models import RandomModels, decode_rows, prompt_rows

    from gearbx_mlx.benchmark.measuring import bandwidth_meter, native_module

    native = native_module()
    found = {}
    with tempfile.TemporaryDirectory() as name, progress_bar() as progress:
        folder, threads = Path(name), native.threads()
        rounds = Rounds(args.trials, bandwidth_meter(), progress)
        if {"decode", "prompt"} & {*args.subjects}:
            models = RandomModels(args, folder, threads)
            if "decode" in args.subjects:
                found["decode"] = decode_rows(models, rounds, args)
            if "prompt" in args.subjects:
                found["prompt"] = prompt_rows(models, rounds)
            del models  # gigabytes
        if "lossless" in args.subjects:
            found["lossless"] = lossless_rows(rounds, args, folder, threads)
    return found, threads


def compare() -> None:
    args = setup_arg_parser().parse_args()
    installed = versions()
    found, threads = measure(args)
    tables = {f"llama_cpp_{subject}": table_of(subject, found[subject]) for subject in found}
    print(*tables.values(), sep="\n")
    if args.json:
        write_text(args.json, as_json(found | {"threads": threads} | installed))
    if args.page:
        fill(args.page, {name: lambda text=text: text for name, text in tables.items()})


def main() -> None:
    run(compare)


if __name__ == "__main__":
    main()
