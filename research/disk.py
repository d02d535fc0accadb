"""Weights from files: checkpoints that are converted and loaded, hints to the system, and the top gear streamed."""

import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from pages import table

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.convert import convert
from gearbx_mlx.decoding.draft_plans import find_rule
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.acceptance import DraftRule, FixedLength, ProductRule

from . import ROOT
from .lossless import widened
from .studies import Found, in_turn, ratios, spread, study

BLOCK = 1 << 24
PEAK = """
import atexit, runpy
atexit.register(lambda: print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))))
runpy.run_module("gearbx_mlx.convert", run_name="__main__")
"""


def random_model(folder: Path, hidden: int, layers: int) -> Path:
    """Write a Llama of random bfloat16 weights, whose largest layer is the head. Returns its directory."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        rms_norm_eps=1e-5,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    model = llama.Model(args)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    path = folder / "original"
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in vars(args).items() if value is not None})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    return path


def read(files: list[Path]) -> None:
    block = bytearray(BLOCK)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def load_geared(path: Path, gears: list[str]) -> None:
    model, _ = load(path)
    gearbox = Gearbox(model, kernels="native")
    for gear in gears:
        gearbox.shift(gear)
    mx.eval(model.parameters())


def fill_arrays(files: list[Path]) -> None:
    """Have MLX read all arrays, and do nothing with them."""
    mx.eval([mx.load(str(file)) for file in files])


PIECE = 2**22  # bytes that are read at a time
ARRAYS = 32
ADVICE = {"sequential": "SEQUENTIAL", "willneed": "WILLNEED", "random": "RANDOM"}


def advise_file(descriptor: int, hint: str) -> None:
    if hint in ADVICE:
        os.posix_fadvise(descriptor, 0, 0, getattr(os, f"POSIX_FADV_{ADVICE[hint]}"))


def by_mapping(file: Path, hint: str) -> None:
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if hint in ADVICE:
            mapped.madvise(getattr(mmap, f"MADV_{ADVICE[hint]}"))
        words = np.frombuffer(mapped, np.uint64, count=len(mapped) // 8)
        words.sum()
        del words


def in_pieces(file: Path, hint: str) -> None:
    """hint "next piece": WILLNEED for one piece, while the one before it is read."""
    memory, size = memoryview(bytearray(PIECE)), file.stat().st_size
    descriptor = os.open(file, os.O_RDONLY)
    advise_file(descriptor, hint)
    for begin in range(0, size, PIECE):
        if hint == "next piece":
            os.posix_fadvise(descriptor, begin + PIECE, PIECE, os.POSIX_FADV_WILLNEED)
        os.preadv(descriptor, [memory], begin)
    os.close(descriptor)


def by_mlx(file: Path, hint: str) -> None:
    """MLX opens the file itself, so only WILLNEED can have an effect: it is of the file, and not of who opened it."""
    if hint != "none":
        descriptor = os.open(file, os.O_RDONLY)
        advise_file(descriptor, hint)
        os.close(descriptor)
    mx.eval(mx.load(str(file)))


WAYS = {
    "mmap": (by_mapping, ("none", "sequential", "willneed", "random")),
    "pieces": (in_pieces, ("none", "sequential", "willneed", "random", "next piece")),
    "mx.load": (by_mlx, ("none", "willneed")),
}


def forget(file: Path) -> None:
    """Remove a file from the system's memory."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


PROMPT = "Once upon a time there was a"
LENGTHS = (2, 8, 15)
BOUNDS = (0.05, 0.2, 0.5)
AT_ONCE = 2**22  # bytes of a plain read
PLAIN = 16  # such reads, of which the speed of the disk is taken
FORMS = {"bf16": "bfloat16, mlx-lm", "resident": "exact, resident", "stream": "exact, streamed"}


def models(directory, times):
    """The bfloat16 model and its geared checkpoint, made if they are not there."""
    original, geared = directory / "bf16", directory / "exact"
    if not original.exists():
        original.mkdir(parents=True)
        model = widened(load()[0], times)
        arrays = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(model.parameters())}
        mx.save_safetensors(str(original / "model.safetensors"), arrays)
        (original / "config.json").write_text(json.dumps(vars(model.args)))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (original / name).write_bytes((DEMO_MODEL / name).read_bytes())
    if not geared.exists():
        convert(original, geared, gears="4,16", format="exact")
    return original, geared


def disk_speed(file):
    """Bytes per second of plain reads of a file that the system does not have in memory."""
    memory, place = memoryview(bytearray(AT_ONCE)), 0
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    for _ in range(PLAIN):
        place += os.preadv(descriptor, [memory], place)
    seconds = time.perf_counter() - begun
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return place / seconds


def pace(bytes_per_second):
    """Let the disk be no faster than this: a read ends no sooner than it would there."""
    plain, lock, free = os.preadv, threading.Lock(), [0.0]

    def paced(descriptor, memories, place):
        with lock:
            begun = time.perf_counter()
            count = plain(descriptor, memories, place)
            free[0] = max(free[0], begun) + count / bytes_per_second
            time.sleep(max(0.0, free[0] - time.perf_counter()))
        return count

    os.preadv = paced  # type: ignore[assignment]


def time_text(gearbox, tokenizer, rule, max_tokens, file):
    """One text after a first token, beside what its bytes from the disk predict."""
    reader, before, texts, begun = gearbox.residency.reader, disk_speed(file), [], 0.0
    drafted = verifications = 0
    for response in stream_generate(
        gearbox.model, tokenizer, PROMPT, max_tokens, gearbox=gearbox, mode=Lossless(rule=rule)
    ):
        if begun:
            drafted, verifications = drafted + response.drafted, verifications + response.passes[-1]
        else:
            begun, read = time.perf_counter(), reader.bytes_read
        texts.append(response.token)
    seconds = time.perf_counter() - begun
    disk = statistics.harmonic_mean([before, disk_speed(file)])
    return {
        "tokens": texts,
        "tokens_per_second": (len(texts) - 1) / seconds,
        "predicted_seconds": (reader.bytes_read - read) / disk,
        "seconds": seconds,
        "disk_bytes_per_token": (reader.bytes_read - read) / (len(texts) - 1),
        "disk_speed": disk,
        "drafted_per_verification": drafted / max(1, verifications),
    }


def time_rules(geared, about, trials):
    """Rule to its texts."""
    model, tokenizer = load(geared)
    gearbox = Gearbox(model, residency="stream", kernels=about.kernels)
    residency: Any = gearbox.residency
    residency.reader.keeps_cache = False
    first: Any = find_rule(gearbox)[0]
    rules: dict[str, Callable[..., DraftRule]] = {
        f"{length} tokens": lambda n=length: FixedLength(n) for length in LENGTHS
    }
    rules |= {f"bound {bound}": lambda b=bound: ProductRule(first.agreement, b) for bound in BOUNDS}
    rules["measured speeds"] = lambda: find_rule(gearbox)[0]
    file = geared / "gears.safetensors"
    time_text(gearbox, tokenizer, find_rule(gearbox)[0], 16, file)  # a warm-up, which learns the order and the speeds
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
    for _ in range(trials):
        for name, make in rules.items():
            found[name].append(time_text(gearbox, tokenizer, make(), about.max_tokens, file))
    assert len({tuple(text["tokens"]) for texts in found.values() for text in texts}) == 1
    return found


def print_text(form, limit, original, geared, max_tokens, kernels):
    """What a process under the limit does: print a text in the top gear."""
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
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)


def under_limit(form: str, limit: int, about: "Streamed") -> tuple[str | None, Any]:
    """The text of a process under a limit, or the last line of its error, and its largest memory in bytes."""
    command = [sys.executable, "-m", "research", "streaming", about.directory, "--times", about.times, "--form", form]
    command += ["--limit", limit, "--kernels", about.kernels, "--max-tokens", about.max_tokens]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
    return (done.stdout, 1024 * int(last)) if done.returncode == 0 else (None, last)


def limits(original, about):
    """The size of the bfloat16 weights, and by form what happens without a limit and with one of that size."""
    size = (original / "model.safetensors").stat().st_size
    free = {form: under_limit(form, 0, about) for form in FORMS}
    return size, free, {form: under_limit(form, size, about) for form in FORMS}


def rules_table(found):
    rows = []
    for name, texts in found.items():

        def median(field, texts=texts):
            return statistics.median(text[field] for text in texts)

        rows.append(
            [
                name,
                f"{median('drafted_per_verification'):.1f}",
                f"{median('disk_bytes_per_token') / 1e6:.0f}",
                f"{median('disk_speed') / 1e6:.0f}",
                f"{median('tokens_per_second'):.2f}",
                spread(text["predicted_seconds"] / text["seconds"] for text in texts),
            ]
        )
    head = ["drafts end", "drafted", "MB a token", "disk, MB/s", "tokens/s", "of what the disk's bytes predict"]
    return table(head, rows)


def limits_table(size, free, limited):
    rows = []
    for form, name in FORMS.items():
        text, last = limited[form]
        same = "the same text" if text == free["bf16"][0] else "another text"
        rows.append([name, f"{free[form][1] / 1e6:.0f}", same if text else last.split(":")[0]])
    return table(["weights", "peak of the process, MB", f"under a limit of {size / 1e6:.0f} MB"], rows)


@dataclass
class Streamed:
    """The models of `streaming`, and how their texts are written."""

    directory: Path
    times: int
    max_tokens: int
    kernels: str


@study("docs/performance.md", minutes=15)
def streaming(
    directory: Path,
    times: int = 8,
    max_tokens: int = 64,
    trials: int = 3,
    kernels: str = "native",
    pace_mb: float = 100.0,
    form: Literal["bf16", "resident", "stream"] | None = None,
    limit: int = 0,
) -> Found | None:
    """The top gear read from the disk, and the limit of memory that only streaming respects.

    The demo model is widened and converted to format exact. The system keeps nothing of the file:
    every pass reads the disk, which is slowed, so that it is what limits the speed, and the load of other programs
    matters little. Its speed is then measured beside each text, by plain reads of the same file.

    First a text under a limit on memory, in processes of their own: the bfloat16 model, format exact in memory, and
    format exact from the disk. The limit is RLIMIT_DATA: the private memory that a process may write, where the weights
    go, since MLX maps no file. RLIMIT_AS would count libraries too, and addresses that are never touched. Then mode
    lossless with drafts of fixed lengths, with fixed bounds on the product of a(H), and with the rule that follows the
    measured speeds.

    Args:
        directory: For the models; they are kept for the next run.
        times: Copies of every unit: a power of two.
        pace_mb: MB/s that the disk is slowed to, if it is faster.
        form: Write one text under --limit, and nothing else.
        limit: Bytes.
    """
    about = Streamed(directory.resolve(), times, max_tokens, kernels)
    original, geared = models(about.directory, times)
    if form:
        print_text(form, limit, original, geared, max_tokens, kernels)
        return None
    memory = limits(original, about)
    pace(1e6 * pace_mb)
    found = time_rules(geared, about, trials)
    tables = {"streaming": rules_table(found), "memory_limit": limits_table(*memory)}
    return Found(tables, {"rules": found, "limits": memory})


@study(minutes=5)
def checkpoint(
    hidden: int = 2048, layers: int = 6, trials: int = 5, gears: str = "4,8,16", folder: Path | None = None
) -> None:
    """The peak memory of converting a random model, and how fast gears are loaded (Linux).

    The peak is compared with the sizes of the output and of the largest layer. The speed of loading gears is compared
    with that of reading the same files from beginning to end, from the page cache and from the disk.

    Args:
        hidden: Width of the model.
        folder: Where to write some gigabytes; the system's temporary directory if not given.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        source, out = random_model(place, hidden, layers), place / "geared"
        shipped: list[Any] = [sys.executable, "-c", PEAK, "--mlx-path", place / "small"]
        command: list[Any] = [sys.executable, "-c", PEAK, "--model", source, "--mlx-path", out, "--embeddings", "keep"]
        idle, peak = (
            int(subprocess.run(c, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]) * 1024 / 1e9
            for c in (shipped, [*command, "--gears", gears])
        )
        base, rest = out / "model.safetensors", out / "gears.safetensors"
        size = sum(file.stat().st_size for file in (base, rest)) / 1e9
        print(f"conversion: peak {peak:.2f} GB, {idle:.2f} GB for the demo model; output {size:.2f} GB, ", end="")
        print(f"head {32000 * hidden * 2 / 1e9:.2f} GB")
        middle = ["mid"] if gears.count(",") > 1 else []
        for cold in (False, True):
            report(out, [base], ["low"], cold, trials)
            report(out, [base, rest], ["low", *middle, "high"], cold, trials)


def report(path: Path, files: list[Path], gears: list[str], cold: bool, trials: int) -> None:
    works = {
        "read": lambda: read(files),
        "fill": lambda: fill_arrays(files),
        "load": lambda: load_geared(path, gears),
    }

    def prepare() -> None:
        mx.clear_cache()
        for file in files:
            forget(file)
        if not cold:
            read(files)

    seconds = in_turn(works, trials, before=prepare)
    size = sum(file.stat().st_size for file in files) / 1e9
    rates = {name: size / statistics.median(spent) for name, spent in seconds.items()}
    place = "disk" if cold else "page cache"
    lines = [f"{' and '.join(gears)}, {place}: {size:.2f} GB loaded at {rates['load']:.2f} GB/s"]
    for name, meaning in (("read", "over one buffer"), ("fill", "them with mx.load")):
        share = spread(ratios(seconds[name], seconds["load"]))
        lines.append(f"{share} of reading {meaning}, {rates[name]:.2f} GB/s")
    print("; ".join(lines))


@study("docs/performance.md", minutes=4)
def hints(directory: Path, megabytes: int = 512, trials: int = 7) -> Found:
    """How weights come from a file, with and without a hint to the system about what is read next (AION 4.1).

    A file is read cold (the system forgets it first) and warm: through a mapping of the file (mmap), whose bytes are
    added up; in pieces into memory that is used again, as gears are streamed; and by mx.load, as checkpoints are. Each
    way is tried with no hint and with each hint in turn; a ratio is of times in the same round. The file is removed.

    Args:
        directory: On the disk that is timed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file, rows = directory / "hints.safetensors", []
    part = megabytes * 2**20 // ARRAYS
    mx.save_safetensors(str(file), {f"{i}": mx.random.randint(0, 255, (part,)).astype(mx.uint8) for i in range(ARRAYS)})
    try:
        for name, (way, kinds) in WAYS.items():
            for state in ("cold", "warm"):
                works = {hint: partial(way, file, hint) for hint in kinds}
                seconds = in_turn(works, trials, before=partial(forget, file) if state == "cold" else lambda: None)
                for hint, times in seconds.items():
                    speed = f"{file.stat().st_size / statistics.median(times) / 1e9:.2f}"
                    rows.append([name, state, hint, speed, spread(ratios(seconds["none"], times))])
    finally:
        file.unlink()
    return Found({"hints": table(["read by", "file", "hint", "GB/s", "times no hint"], rows)})
