"""Run mlx-lm's own tests with this package's models in the place of mlx-lm's.

    python scripts/run_mlx_lm_tests.py                                  the four files of tests, with every wrapper
    python scripts/run_mlx_lm_tests.py --only generate --wrapper LosslessModel

A wrapper stands in a model's place, so a test that passes with the model has to pass with the wrapper. The tests are
those of the installed mlx-lm's source distribution, which pip gets once; the demo model is in the place of the Hub's.
Models that are too large to be quantized in a test are left out, for mlx-lm too. Every logit is computed, for mlx-lm
too: some tests look only at shapes, of products that MLX cannot compute on a CPU.
"""

import argparse
import sys
from pathlib import Path

import platformdirs
from mlx_lm_tests.running import Outcomes, get_tests, run
from mlx_lm_tests.wrappers import PLAIN, WRAPPERS
from pages import table

from gearbx_mlx.errors import GearbxError

FILES = ("generate", "prompt_cache", "server", "models")

Losses = list[tuple[str, str, str, str]]  # file, test, wrapper and why, of tests that mlx-lm's model passes


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FILES, action="append", help="Run this file of tests; may be repeated.")
    parser.add_argument("--wrapper", choices=[*WRAPPERS][1:], action="append", help="Try this one; may be repeated.")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="Run tests that pytest's -k takes.")
    parser.add_argument("--tests", type=Path, metavar="DIR", help="The directory of mlx-lm's tests; nothing is got.")
    cache = platformdirs.user_cache_path("gearbx-mlx") / "mlx-lm-tests"
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="Where the tests are kept.")
    parser.add_argument("--seconds", type=float, default=900, help="After which a file's tests are ended.")
    return parser


def lost(plain: Outcomes, wrapped: Outcomes) -> dict[str, str]:
    """Tests that pass with mlx-lm's model and not with a wrapper, and why."""
    late = "did not run in time" if wrapped.late else "did not run"
    return {
        name: wrapped.failed.get(name) or wrapped.skipped.get(name) or late for name in plain.passed - wrapped.passed
    }


def compare(tests: Path, file: str, names: list[str], args: argparse.Namespace) -> tuple[list[object], Losses]:
    """A row of the table, and what is lost with each wrapper.

    Raises:
        GearbxError: mlx-lm itself passes none of the tests.
    """
    plain = run(tests, file, PLAIN, args.seconds, args.k)
    if not plain.passed:
        raise GearbxError(f"no test of {tests / f'test_{file}.py'} passes with mlx-lm itself; choose others")
    counts, losses = [], []
    for name in names:
        wrapped = run(tests, file, name, args.seconds, args.k)
        counts.append(len(plain.passed & wrapped.passed))
        losses += [(f"test_{file}", test, name, why) for test, why in lost(plain, wrapped).items()]
    return [f"test_{file}", len(plain.passed), *counts, len(plain.failed), len(plain.skipped)], losses


def main() -> int:
    args = setup_arg_parser().parse_args()
    names = args.wrapper or [*WRAPPERS][1:]
    rows, losses = [], []
    try:
        tests = args.tests or get_tests(args.cache)
        for file in args.only or FILES:
            row, lost_here = compare(tests, file, names, args)
            rows.append(row)
            losses += lost_here
            print(*row, file=sys.stderr)
    except GearbxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(["tests", PLAIN, *names, f"fail with {PLAIN}", "left out"], rows))
    for each in sorted(losses):
        print(*each, sep=": ")
    return int(bool(losses))


if __name__ == "__main__":
    sys.exit(main())
