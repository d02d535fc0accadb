"""Let commands of all modes end by themselves, many times, and count how they end.

    python scripts/end_commands.py --times 20

An abort at the end of a process is rare: threads of MLX and of the native kernels still live then. So each run is
forked from a process that has imported everything and evaluated nothing, and ends as Python itself does. A run that a
signal ends leaves what it wrote, faulthandler's traces among it, and a core file where the system writes them there.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from pages import table

ONE = "generate -m 12 --temp 0 --verbose False --kernels {kernels}"
QUANTIZED = f"{ONE} --model {{quantized}} --gears 4,8"
RUNS = {
    "static": f"{QUANTIZED} --mode static --gear high",
    "static, low": f"{QUANTIZED} --mode static --gear low",
    "route": f"{QUANTIZED} --mode route",
    "kickdown": f"{QUANTIZED} --mode kickdown",
    "lossless": f"{QUANTIZED} --mode lossless",
    "exact": f"{ONE} --format exact --gears 4,16",
    "route, on disk": f"{ONE} --mode route --residency disk",
    "route, KV gears": f"{ONE} --mode route --kv-gears 4,16",
    "route, controller": f"{ONE} --mode route --target-tps 50",
    "draft model": f"{ONE} --draft-model {{quantized}}",
    "pair": "generate -m 12 --small-model {quantized}",
    "telemetry-only": "generate -m 12 --mode telemetry-only --model {quantized}",
    "16 alone": "generate -m 12 --gears 16",
    "chat": "chat -m 8 --model {quantized} --kernels {kernels}",
}
SOURCE = """
import faulthandler, json, os, sys
from importlib import import_module
import gearbx_mlx.chat.run, gearbx_mlx.generate.run
while line := sys.stdin.readline():
    if os.fork() == 0:
        break
    print(os.wait()[1], flush=True)
if line:
    command, folder = json.loads(line)
    os.chdir(folder)
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    faulthandler.enable()
    sys.argv = [f"gearbx_mlx.{command[0]}", *command[1:]]
    import_module(f"gearbx_mlx.{command[0]}").main()
"""


def quantize(directory: Path) -> None:
    """Write the demo model in 8 bits, as stock mlx-lm does."""
    code = (
        f"import gearbx_mlx.loading as l, mlx_lm; mlx_lm.convert(str(l.DEMO_MODEL), {str(directory)!r}, True, q_bits=8)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def end_of(server: "subprocess.Popen[str]", line: str, folder: Path) -> str:
    """Run a command in a new folder, and return how it ended: ok, a status, or the name of a signal."""
    folder.mkdir()
    (folder / "in").write_text("Hello\nHow are you?\n")
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([shlex.split(line), str(folder)]) + "\n")
    server.stdin.flush()
    status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
    if status == 0:
        shutil.rmtree(folder)
    return "ok" if status == 0 else signal.Signals(-status).name if status < 0 else f"status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="Run each command so often on each kind of kernels.")
    parser.add_argument("--only", choices=RUNS, metavar="NAME", help=f"One of {', '.join(RUNS)}.")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    work = Path(tempfile.mkdtemp(prefix="gearbx-ends-"))
    quantize(work / "quantized")
    ends: dict[str, Counter[str]] = {name: Counter() for name in RUNS if args.only in (None, name)}
    with subprocess.Popen(
        [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        for number in range(args.times):
            for name, counts in ends.items():
                for kernels in ("mlx", "native"):
                    line = RUNS[name].format(kernels=kernels, quantized=work / "quantized")
                    counts[end_of(server, line, work / f"{name}-{kernels}-{number}")] += 1
            print(f"{number + 1} of {args.times}: {dict(sum(ends.values(), Counter()))}", flush=True)
    kinds = sorted({kind for counts in ends.values() for kind in counts})
    print(table(["command", *kinds], [[name, *(counts[kind] for kind in kinds)] for name, counts in ends.items()]))
    bad = any(kind != "ok" for kind in kinds)
    print(f"what they left: {work}") if bad else shutil.rmtree(work)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
