"""Run the commands with wrong flags and damaged files of every kind, and report failures that no user should see.

    python scripts/fuzz_commands.py --minutes 60 --jobs 4 --keep failures

Flags come from the parsers, with their own bounds and choices; a damaged file is a correct one with a change. A command
may succeed, or refuse in one line. Everything else is a failure: a traceback, an unforeseen error, a fatal signal, an
endless wait, half a file left behind. Hypothesis searches for the shortest command that fails.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzzing.inputs import make_inputs
from fuzzing.rounds import Failure, Place, Results, play_all
from pages import table
from rich.progress import Progress

from gearbx_mlx.__main__ import COMMANDS

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "", "TQDM_DISABLE": "1"}


def fuzz(args: argparse.Namespace, place: Place) -> Results:
    """Play rounds until the time is over or enough commands have run."""
    begin = time.monotonic()
    end = begin + args.minutes * 60
    most = args.examples or float("inf")
    results = Results(lambda so_far: time.monotonic() > end or so_far.count >= most)
    with Progress() as progress, ThreadPoolExecutor(args.jobs) as pool:
        task = progress.add_task("", total=end - begin)
        jobs = play_all(pool, args.jobs, args.seed, args.only, results, place)
        while not all(job.done() for job in jobs):
            time.sleep(0.2)
            text = f"{results.count} commands, {len(results.failures)} failures"
            progress.update(task, completed=time.monotonic() - begin, description=text)
    for job in jobs:
        job.result()
    return results


def statuses_table(results: Results) -> str:
    """Return the number of times that each command ended with each status."""
    names = sorted({name for counts in results.statuses.values() for name in counts})
    rows = [
        [command, kind, counts.total(), *(counts[name] or "" for name in names)]
        for (command, kind), counts in sorted(results.statuses.items())
    ]
    return table(["command", "kind", "runs", *names], rows)


def keep(failure: Failure, inputs: Path, directory: Path) -> str:
    """Make the directory in which a failure can be repeated, and return its name."""
    directory.mkdir(parents=True)
    failure.case.prepare(inputs, directory)
    (directory / "arguments.json").write_text(json.dumps([failure.case.name, *failure.case.arguments]))
    (directory / "stderr.txt").write_text(failure.outcome.err, encoding="utf-8", errors="replace")
    return directory.name


def shown(failures: Iterable[tuple[tuple[str, str], Failure]], inputs: Path, kept: Path | None) -> Iterable[str]:
    """Yield each failure: what it is, how often it happened, and how to repeat it."""
    for number, ((name, problem), failure) in enumerate(failures, 1):
        line = shlex.join(["python", "-m", f"gearbx_mlx.{name}", *failure.case.arguments])
        yield f"\n{number}. {name}: {problem} ({failure.count} times)"
        yield f"   {line.encode('utf-8', 'backslashreplace').decode()}"
        for file, content in failure.case.files.items():
            yield f"   with {file}: {content if isinstance(content, str) else content[:80]!r}"
        last = failure.outcome.err.splitlines()[-3:]
        yield from (f"   | {text[:300]}" for text in last)
        if kept:
            yield f"   in {kept / keep(failure, inputs, kept / str(number))}"


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--examples", type=int, help="End after this many commands.")
    parser.add_argument("--seed", type=int, default=0, help="The same seed makes the same commands.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Commands at a time.")
    parser.add_argument("--only", choices=COMMANDS, metavar="COMMAND", help="Fuzz this command alone.")
    parser.add_argument("--limit", type=float, default=20, help="Seconds after which a command is interrupted.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Make a directory to repeat each failure in.")
    return parser


def main() -> int:
    args = setup_arg_parser().parse_args()
    os.environ |= OFFLINE
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory) / "inputs", Path(directory) / "work", args.limit)
        place.inputs.mkdir()
        place.work.mkdir()
        with Progress() as progress:
            for _ in progress.track(make_inputs(place.inputs), description="making inputs"):
                pass
        results = fuzz(args, place)
        print(statuses_table(results))
        print(f"{results.count} commands, {len(results.failures)} failures, seed {args.seed}")
        for line in shown(sorted(results.failures.items()), place.inputs, args.keep):
            print(line)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
