"""Stop commands at random moments, and see whether they end as they should and go on to the same result.

    python scripts/stop_commands.py kill --times 1000      SIGKILL, and then the same command again until it ends
    python scripts/stop_commands.py signal --times 200     SIGINT and SIGTERM: the exit status, and nothing left behind
    python scripts/stop_commands.py disk --times 200       a disk that is full, and then has room (mounts: as root)

Every command that writes takes its turn, on tiny models. An uninterrupted run shows what each has to write.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzzing.inputs import make_inputs
from pages import table
from rich.progress import Progress
from stopping.commands import COMMANDS, Expected, expected_of
from stopping.trials import TRIALS, Trial


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=TRIALS)
    parser.add_argument("--times", type=int, default=100, help="Stop so often.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Commands at a time.")
    parser.add_argument("--only", choices=COMMANDS, metavar="NAME", help=f"One of {', '.join(COMMANDS)}.")
    return parser


def stop_all(args: argparse.Namespace, inputs: Path, work: Path, expected: dict[str, Expected]) -> list[Trial]:
    """Trials of every command in turn, until there were enough stops."""
    stop = TRIALS[args.how]
    trials: list[Trial] = []

    def play(job: int) -> None:
        for number in range(job, 10**9, args.jobs):
            if sum(trial.stops for trial in trials) >= args.times:
                return
            name = list(expected)[number % len(expected)]
            place = work / str(number)
            place.mkdir()
            trials.append(stop(name, expected[name], inputs, place, random.Random(f"{args.seed} {number}")))

    with Progress() as progress, ThreadPoolExecutor(args.jobs) as pool:
        task = progress.add_task("", total=args.times)
        jobs = [pool.submit(play, job) for job in range(args.jobs)]
        while not all(job.done() for job in jobs):
            time.sleep(0.2)
            problems = sum(trial.problem is not None for trial in trials)
            stops = sum(trial.stops for trial in trials)
            progress.update(task, completed=stops, description=f"{stops} stops, {problems} problems")
    for each in jobs:
        each.result()
    return trials


def main() -> int:
    args = setup_arg_parser().parse_args()
    with tempfile.TemporaryDirectory() as directory:
        inputs, work = Path(directory) / "inputs", Path(directory) / "work"
        inputs.mkdir()
        work.mkdir()
        names = [args.only] if args.only else list(COMMANDS)
        with Progress() as progress:
            for _ in progress.track(make_inputs(inputs), description="making inputs"):
                pass
            expected = {name: expected_of(name, inputs, work) for name in progress.track(names, description="runs")}
        trials = stop_all(args, inputs, work, expected)
    rows = []
    for name in names:
        own = [trial for trial in trials if trial.name == name]
        rows.append([name, len(own), sum(t.stops for t in own), sum(t.problem is not None for t in own)])
    print(table(["command", "runs", "stops", "problems"], rows))
    for trial in trials:
        if trial.problem is not None:
            print(f"{trial.name}: {trial.problem}")
    return int(any(trial.problem for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
