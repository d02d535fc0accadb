"""Weights on disk: memory of a streamed top gear, and of each residency."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from gearbx_mlx import Gearbox, load, stream_generate
from gearbx_mlx.benchmark.decode import decode_seconds
from gearbx_mlx.convert import convert
from gearbx_mlx.errors import GearbxError, check_choice
from gearbx_mlx.loading import find

from . import ROOT
from .studies import Found, named, spread, study, table_here

LIMIT_STEP, MAX_LIMIT = 8 << 20, 1 << 30
PROMPT = "Once upon a time there was a"
FORMS = {"bf16": "bfloat16, mlx-lm", "resident": "exact, resident", "stream": "exact, streamed"}


def models(model: str, directory: Path) -> tuple[Path, Path]:
    """Return the bfloat16 model and its geared checkpoint, which is made if it is not there."""
    original, geared = find(model), directory / "exact"
    if not geared.exists():
        convert(original, geared, gears="4,16", format="exact")
    return original, geared


def memory(field: str) -> int:
    """Return bytes of this process, as Linux counts them: VmRSS, what is really there, or VmHWM, the most so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def study_in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "research", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def print_text(form, limit, original, geared, max_tokens, kernels):
    """Generate in the top gear, and print the output: the work of a process under a limit."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if form == "bf16":
        model, tokenizer = load(original)
        gearbox = Gearbox(model, "16", kernels=kernels, dtype="float32")  # weights stay in their type
    else:
        model, tokenizer = load(geared)
        gearbox = Gearbox(model, residency=form, kernels=kernels)
        if form == "stream":
            residency: Any = gearbox.residency
            residency.reader.keeps_cache = False
    mode = "static" if form == "bf16" else "lossless"
    responses = stream_generate(model, tokenizer, PROMPT, max_tokens, gearbox=gearbox, mode=mode)
    print(json.dumps([response.token for response in responses]))
    print(memory("VmHWM"), file=sys.stderr)


def under_limit(command: Sequence[object], form: str, limit: int) -> tuple[str | None, Any]:
    """Return the text of a process under a limit, or the last line of its error, and its largest memory in bytes."""
    done = study_in_process(*command, "--form", form, "--limit", limit)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
    return (done.stdout, int(last)) if done.returncode == 0 else (None, last)


def least_limit(command: Sequence[object], form: str, text: str | None) -> int:
    """Return the least limit in bytes, to LIMIT_STEP, under which a process writes the text."""
    low, high = 0, MAX_LIMIT
    while high - low > LIMIT_STEP:
        middle = (low + high) // 2
        low, high = (low, middle) if under_limit(command, form, middle)[0] == text else (middle, high)
    return high


@study("docs/performance.md", minutes=5)
def streaming(
    directory: Path,
    model: str = "smollm2",
    max_tokens: int = 64,
    kernels: str = "native",
    form: Literal["bf16", "resident", "stream"] | None = None,
    limit: int = 0,
) -> Found | None:
    """Find the least memory for generation: in bfloat16, in format exact, and with the top gear on disk.

    A bfloat16 model is converted to format exact. Separate processes then generate under memory limits that approach
    the least sufficient one. The limit is RLIMIT_DATA: private writable memory, which contains the weights, since MLX
    maps no file. RLIMIT_AS would also count libraries and untouched addresses.

    Args:
        directory: Directory for the converted model, kept for the next run.
        form: Generate once under --limit, and do nothing else.
        limit: Memory limit in bytes.
    """
    original, geared = models(model, directory.resolve())
    if form:
        print_text(form, limit, original, geared, max_tokens, kernels)
        return None
    command = ["streaming", directory.resolve(), "--model", model, "--max-tokens", max_tokens, "--kernels", kernels]
    free = {name: under_limit(command, name, 0) for name in FORMS}
    if missing := [last for text, last in free.values() if text is None]:
        raise GearbxError(f"no text without a limit: {missing[0]}")
    text = free["bf16"][0]
    least = {name: least_limit(command, name, text) for name in FORMS}
    rows = [
        [FORMS[name], f"{most / MEGABYTE:.0f}", f"{least[name] / MEGABYTE:.0f}", "yes" if own == text else "no"]
        for name, (own, most) in free.items()
    ]
    head = [f"{named(model)}, {max_tokens} tokens", "peak of the process, MB", "least limit, MB", "the same text"]
    return Found({"memory_limit": table_here(head, rows)}, {"free": free, "least": least})


# Where idle gears are

RESIDENCIES = {  # name: the checkpoint, its format and residency
    "4-bit gear": ("original", "4", "affine", "resident"),
    "16-bit gear": ("original", "16", "planes", "resident"),
    "resident": ("original", "4,16", "planes", "resident"),
    "disk": ("original", "4,16", "planes", "disk"),
    "exact": ("exact", "4,16", "exact", "resident"),
    "exact, disk": ("exact", "4,16", "exact", "disk"),
    "stream": ("exact", "4,16", "exact", "stream"),
}
MEGABYTE = 1e6


def of_residency(name: str, paths: dict[str, Path], tokens: int, trials: int) -> dict[str, dict[str, list[float]]]:
    """Return, for each gear and trial: seconds of a `shift` into it and of a `token`, and the `memory` in bytes."""
    checkpoint, ladder, format, residency = RESIDENCIES[name]
    empty = memory("VmRSS")
    model, _ = load(paths[checkpoint])
    how: dict[str, Any] = {"kernels": "native", "residency": residency, "checkpoint": paths[checkpoint]}
    gearbox = Gearbox(model, **how) if checkpoint == "exact" else Gearbox(model, ladder, format=format, **how)
    found: dict[str, dict[str, list[float]]] = {}
    for trial in range(trials + 1):
        for gear in gearbox.ladder:
            begun = time.perf_counter()
            gearbox.shift(gear)
            mx.eval(gearbox.model.parameters())
            shift, token = time.perf_counter() - begun, decode_seconds(gearbox.model, tokens)
            if trial:  # the first time a gear is made
                figures = {"shift": shift, "token": token, "memory": memory("VmRSS") - empty}
                for what, value in figures.items():
                    found.setdefault(str(gear.bits), {}).setdefault(what, []).append(value)
    return found


def residency_row(name: str, found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Memory, time of a shift and tokens per second, in 4 and in 16 bits."""
    low, high = found.get("4"), found.get("16")
    cells = []
    for what, scale, digits in (("memory", 1 / MEGABYTE, 0), ("shift", 1e3, 1)):
        for gear in (low, high):
            shifts = len(found) > 1 or what != "shift"  # one gear alone has no shifts
            cells.append(spread((scale * value for value in gear[what]), digits) if gear and shifts else "")
    speeds = [spread((1 / value for value in gear["token"]), 0) if gear else "" for gear in (low, high)]
    return [name, *cells, *speeds]


@study("docs/formats.md", minutes=3)
def residencies(
    model: str = "smollm2",
    directory: Path | None = None,
    tokens: int = 24,
    trials: int = 5,
    form: str | None = None,
) -> Found | None:
    """Measure each residency: memory in the low and in the top gear, time of a shift, speed (Linux).

    Each residency has its own process, which shifts between 4 and 16 bits and generates in both. Memory is the increase
    of the process's memory from before loading the model.

    Args:
        model: Directory or Hub repository of a bfloat16 original.
        directory: Directory for the checkpoint of format exact, kept for the next run.
        form: Measure one residency, and do nothing else.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = (directory or Path(temporary)).resolve()
        paths = dict(zip(("original", "exact"), models(model, place)))
        if form:
            check_choice("--form", form, RESIDENCIES)
            print(json.dumps(of_residency(form, paths, tokens, trials)))
            return None
        found = {}
        for name in RESIDENCIES:
            flags = ["--model", model, "--directory", place, "--tokens", tokens, "--trials", trials]
            done = study_in_process("residencies", *flags, "--form", name)
            if done.returncode:
                raise GearbxError(
                    f"{name}: its process ended with status {done.returncode}: {done.stderr.strip()[-200:]}"
                )
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    head = ["residency", "memory, 4-bit gear, MB", "16-bit gear", "shift to 4 bits, ms", "to 16 bits"]
    rows = [residency_row(name, each) for name, each in found.items()]
    return Found({"residencies": table_here([*head, "tokens/s, 4-bit gear", "16-bit gear"], rows)}, found)
