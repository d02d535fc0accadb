"""Time the top gear read from the disk, and find the limit of memory that only streaming respects.

    python scripts/time_streaming.py --directory streaming [--page docs/performance.md]

The demo model is widened as in time_lossless.py, so that drafts are accepted as in a trained model of some hundred
megabytes, and converted to format exact. The system keeps nothing of the file: every pass reads the disk. The disk is
slowed to --pace, so that it is what limits the speed, and the load of other programs matters little. Its speed is then
measured beside each text, by plain reads of the same file.

First a text under a limit on memory, in processes of their own: the bfloat16 model, format exact in memory, and format
exact from the disk. The limit is RLIMIT_DATA: the private memory that a process may write, where the weights go, since
MLX maps no file. RLIMIT_AS would count libraries too, and addresses that are reserved for threads and never touched.
Then mode lossless with drafts of fixed lengths, with fixed bounds on the product of a(H), and with the rule that
follows the measured speeds.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from pages import fill, table
from time_lossless import widened

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.convert import convert
from gearbx_mlx.decoding.draft_plans import find_rule
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.acceptance import FixedLength, ProductRule

PROMPT = "Once upon a time there was a"
LENGTHS = (2, 8, 15)
BOUNDS = (0.05, 0.2, 0.5)
AT_ONCE = 2**22  # bytes of a plain read
PLAIN = 16  # such reads, of which the speed of the disk is taken
FORMS = {"bf16": "bfloat16, mlx-lm", "resident": "exact, resident", "stream": "exact, streamed"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, type=Path, help="For the models; they are kept for the next run.")
    parser.add_argument("--times", type=int, default=8, help="Copies of every unit: a power of two. Default: 8")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--kernels", default="native")
    parser.add_argument("--pace", type=float, default=100, help="MB/s that the disk is slowed to, if it is faster.")
    parser.add_argument("--page", type=Path, help="Where to write the tables.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--form", choices=FORMS, help="Write one text under --limit, and nothing else.")
    parser.add_argument("--limit", type=int, help="Bytes.")
    return parser.parse_args()


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

    os.preadv = paced


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


def time_rules(geared, args):
    """Rule to its texts."""
    model, tokenizer = load(geared)
    gearbox = Gearbox(model, residency="stream", kernels=args.kernels)
    gearbox.residency.reader.keeps_cache = False
    agreement = find_rule(gearbox)[0].agreement
    rules = {f"{length} tokens": lambda n=length: FixedLength(n) for length in LENGTHS}
    rules |= {f"bound {bound}": lambda b=bound: ProductRule(agreement, b) for bound in BOUNDS}
    rules["measured speeds"] = lambda: find_rule(gearbox)[0]
    file = geared / "gears.safetensors"
    time_text(gearbox, tokenizer, find_rule(gearbox)[0], 16, file)  # a warm-up, which learns the order and the speeds
    found = {name: [] for name in rules}
    for _ in range(args.trials):
        for name, make in rules.items():
            found[name].append(time_text(gearbox, tokenizer, make(), args.max_tokens, file))
    assert len({tuple(text["tokens"]) for texts in found.values() for text in texts}) == 1
    return found


def write_text(form, limit, original, geared, args):
    """What a process under the limit does: print a text in the top gear."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if form == "bf16":
        model, tokenizer = load(original)
        gearbox = Gearbox(model, "16", kernels=args.kernels, dtype="float32")  # weights stay in their type
    else:
        model, tokenizer = load(geared)
        gearbox = Gearbox(model, residency=form, kernels=args.kernels)
        if form == "stream":
            gearbox.residency.reader.keeps_cache = False
    mode = "static" if form == "bf16" else "lossless"
    responses = stream_generate(model, tokenizer, PROMPT, args.max_tokens, gearbox=gearbox, mode=mode)
    print(json.dumps([response.token for response in responses]))
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)


def under_limit(form, limit, args):
    """The text of a process under a limit, or the last line of its error, and its largest memory in bytes."""
    command = [sys.executable, __file__, "--directory", args.directory, "--times", args.times, "--form", form]
    command += ["--limit", limit, "--kernels", args.kernels, "--max-tokens", args.max_tokens]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
    return (done.stdout, 1024 * int(last)) if done.returncode == 0 else (None, last)


def limits(original, geared, args):
    """The size of the bfloat16 weights, and by form what happens without a limit and with one of that size."""
    size = (original / "model.safetensors").stat().st_size
    free = {form: under_limit(form, 0, args) for form in FORMS}
    return size, free, {form: under_limit(form, size, args) for form in FORMS}


def rules_table(found):
    rows = []
    for name, texts in found.items():
        ratios = [text["predicted_seconds"] / text["seconds"] for text in texts]

        def median(field, texts=texts):
            return statistics.median(text[field] for text in texts)

        rows.append(
            [
                name,
                f"{median('drafted_per_verification'):.1f}",
                f"{median('disk_bytes_per_token') / 1e6:.0f}",
                f"{median('disk_speed') / 1e6:.0f}",
                f"{median('tokens_per_second'):.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
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


def main():
    args = parse_arguments()
    original, geared = models(args.directory, args.times)
    if args.form:
        write_text(args.form, args.limit, original, geared, args)
        return
    memory = limits(original, geared, args)
    pace(1e6 * args.pace)
    found = time_rules(geared, args)
    tables = {"streaming": lambda: rules_table(found), "memory_limit": lambda: limits_table(*memory)}
    print(*(make() for make in tables.values()), sep="\n")
    if args.page:
        fill(args.page, tables)
    if args.json:
        args.json.write_text(json.dumps({"rules": found, "limits": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
