"""Speed of the first starts on a machine: each start is a new process with a different prompt."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import platformdirs
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, Static, load, stream_generate
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.kernels.compiler import AVX2, CPU_VARIABLE, NATIVE_CPU, vector_instructions

from . import ROOT
from .lossless import ASSISTANT, encode
from .real_models import MODELS
from .studies import Found, named, spread, study, table_here

CACHE = "gearbx-mlx"
DEFAULT = "planes 4,16"  # of gears and formats
COLUMNS = {NATIVE_CPU: f"speedup, {vector_instructions()} kernels", AVX2: "speedup, AVX2 kernels"}
TITLES = {"smollm2": ("SmolLM2 135M", "Q4_1")} | {name: (model.title, model.source) for name, model in MODELS.items()}
WARM = 24  # tokens


def written(
    gearbox: Gearbox, tokenizer, prompt: list[int], mode: Lossless | Static, tokens: int, **keywords: Any
) -> tuple[list, float]:
    """Return a text, and the seconds of a token after its first one."""
    begun, text = 0.0, []
    for response in stream_generate(gearbox.model, tokenizer, prompt, tokens, gearbox=gearbox, mode=mode, **keywords):
        begun = begun or time.perf_counter()
        text.append(response.token)
    return text, (time.perf_counter() - begun) / max(len(text) - 1, 1)


def start(model: str, gears: str, format: str, prompt: str, tokens: int) -> dict[str, float]:
    """Generate in mode lossless for the first time in a process, between two runs of plain decoding.

    The memory of a shared machine is faster at some times than at others, for seconds each. Before all three, both
    gears generate a few tokens, so that their weights are in memory.
    """
    loaded, tokenizer = load(model)
    gearbox = Gearbox(loaded, gears, format=format)
    asked = list(encode(tokenizer, prompt))
    for gear in ("low", "high"):
        written(gearbox, tokenizer, asked, Static(gear), WARM)
    runs = [written(gearbox, tokenizer, asked, mode, tokens) for mode in (Static(), Lossless(), Static())]
    (before, plain), (drafted, seconds), (after, plain_again) = runs
    return {
        "times": statistics.mean((plain, plain_again)) / seconds,
        "identical": float(before == drafted == after),
    }


def without_times(to: Path) -> None:
    """Copy compiled kernels, and no times of passes, into an empty cache."""
    kept = Path(platformdirs.user_cache_path(CACHE, appauthor=False))
    (to / CACHE).mkdir(mode=0o700)
    for file in kept.glob("*.so*"):
        shutil.copy2(file, to / CACHE / file.name)


@study("docs/performance.md", minutes=12)
def lossless_starts(
    model: str = "smollm2",
    gears: str = "4,16",
    format: str = "planes",
    prompts: Path = ASSISTANT,
    series: int = 4,
    starts: int = 4,
    max_tokens: int = 100,
) -> Found:
    """Time the outputs of first starts: series of starts from an empty cache, each with a different prompt.

    Args:
        prompts: File with one prompt per line.
        starts: Starts of each series.
    """
    texts = cycle(read_prompts(prompts))
    found: list[list[dict[str, float]]] = []
    for _ in track(range(series), "series"):
        with tempfile.TemporaryDirectory() as directory:
            without_times(Path(directory))
            environment = os.environ | {"XDG_CACHE_HOME": directory}
            found.append([])
            for text in islice(texts, starts):
                asked = json.dumps([model, gears, format, text, max_tokens])
                run = [sys.executable, "-m", "research.starts", asked]
                done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
                found[-1].append(json.loads(done.stdout.splitlines()[-1]))
    times = [[each["times"] for each in one] for one in found]
    every = [each for one in times for each in one]
    identical = sum(int(each["identical"]) for one in found for each in one)
    rows = [[f"{number}", spread(column)] for number, column in enumerate(zip(*times), 1)]
    rows.append(["all", f"{spread(every)}; {identical} of {len(every)} outputs identical"])
    head = ["start", f"speedup over plain decoding, {model} {gears}: median (range)"]
    return Found({"lossless_starts": table_here(head, rows)}, found)


@study("README.md", "docs/lossless.md", minutes=25)
def lossless_models(
    models: list[str] = ["smollm2", "qwen-0.5b", "qwen-1.5b"],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [3, 5],  # noqa: B006
    max_tokens: int = 100,
    pairs: int = 1,
) -> Found:
    """Time the default settings on real models against plain decoding, as `lossless-time` does.

    Also time whole commands with a copy in the cache, from Enter to the end. With AVX-512, each model is also timed
    with the AVX2 kernels that other PCs have.

    Args:
        models: Names as `generate` takes them, or of `real-models`.
        num_prompts: Number of prompts of the files of `lossless-time`: questions of GSM8K, and requests for chat and
            code.
    """
    found: dict[str, dict[str, list[float]]] = {}
    whole: dict[str, list[float]] = {}
    texts = Counter[bool]()
    for model, cpu in track(list(product(models, kinds_of_kernels())), "models"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            given = ["--model", model, "--settings", DEFAULT, "--max-tokens", max_tokens, "--pairs", pairs]
            given += ["--num-prompts", *num_prompts, "--json", file.name]
            run = [sys.executable, "-m", "research", "lossless-time", *map(str, given)]
            subprocess.run(run, env=os.environ | {CPU_VARIABLE: cpu}, cwd=ROOT, capture_output=True, check=True)
            measured = json.loads(Path(file.name).read_text("utf-8"))
        found.setdefault(model, {})[cpu] = measured["faster"][DEFAULT]
        texts += Counter({True: measured["same"][DEFAULT], False: sum(num_prompts) - measured["same"][DEFAULT]})
        if cpu == NATIVE_CPU:
            whole[model] = whole_commands(model, read_prompts(ASSISTANT)[: sum(num_prompts)], max_tokens)
    rows = [
        [*TITLES[named(model)], *map(spread, times.values()), spread(whole[model])] for model, times in found.items()
    ]
    head = ["model", "file, unpacked to 16 bits", *(COLUMNS[cpu] for cpu in kinds_of_kernels())]
    head.append(f"speedup with startup, {vector_instructions()} kernels, copy already cached")
    same = f"{texts[True]} of {texts.total()} outputs identical to plain decoding"
    sizes = f"{sum(num_prompts)} prompts per model and instruction set, {max_tokens} tokens"
    about = f"{sizes}; median (range); {same}"
    return Found({"lossless_models": f"{table_here(head, rows)}\n{about}\n"}, {"tokens": found, "commands": whole})


def whole_commands(model: str, prompts: list[str], max_tokens: int) -> list[float]:
    """Return the seconds of a whole command in mode static over those of the default, for each prompt, in turn.

    From Enter to the end of the process, with all that is imported, loaded and made. An earlier start of both has left
    in the cache what it leaves there.
    """

    def seconds(prompt: str, *flags: str) -> float:
        run = [sys.executable, "-m", "gearbx_mlx", "generate", "--model", model, "--prompt", prompt, *flags]
        begun = time.perf_counter()
        subprocess.run([*run, "--max-tokens", str(max_tokens)], cwd=ROOT, capture_output=True, check=True)
        return time.perf_counter() - begun

    static = "--mode", "static", "--gears", "4,16"
    for flags in ((), static):
        seconds(prompts[0], *flags)
    return [seconds(prompt, *static) / seconds(prompt) for prompt in prompts]


def kinds_of_kernels() -> list[str]:
    """Return values of GEARBX_CPU: the processor's own, and AVX2 if that is less."""
    return [NATIVE_CPU, AVX2] if vector_instructions() == "AVX-512" else [NATIVE_CPU]


if __name__ == "__main__":
    print(json.dumps(start(*json.loads(sys.argv[1]))))
