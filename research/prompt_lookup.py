"""Prompt lookup as the only drafter, for models with one gear."""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, Static, load
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.routing.ngrams import NgramTable

from . import ROOT
from .llama_cpp import rewritten
from .lossless import ASSISTANT, encode
from .policy_regret import OWN_TEXTS
from .real_models import MODELS, folder, gguf_of
from .starts import TITLES, written
from .studies import HELD_OUT, Found, named, spread, study, table, table_here

FILE, EIGHT = "file", "q8_0"  # in place of gears: a GGUF file's own bits, of the file as it is or rewritten
MODES = {"own": Lossless(share_lookup=False), "earlier": Lossless()}
"""Prompt lookup in the prompt and the output, and in earlier texts too."""


def prompts_by_kind(count: int) -> dict[str, list[str]]:
    """Return up to `count` prompts of each kind."""
    mixed = read_prompts(ASSISTANT)  # chat and code in turn
    kinds = {"chat": mixed[::2], "code": mixed[1::2], "math": read_prompts(HELD_OUT), "edit": read_prompts(OWN_TEXTS)}
    return {kind: prompts[:count] for kind, prompts in kinds.items()}


def rates_at_places(texts: Sequence[tuple[list[int], list[int]]], places: int = 3) -> list[float]:
    """Return the share of generated tokens that the table predicts, at place 1, 2, ... given the places before.

    texts: tokens of prompts and outputs; each has its own table.
    """
    right, all_places = [0] * places, [0] * places
    for prompt, output in texts:
        table = NgramTable()
        for token in prompt:
            table.read(token)
        for position, token in enumerate(output):
            proposed = table.proposed(places)
            for place in range(min(places, len(output) - position)):
                all_places[place] += 1
                if place >= len(proposed) or proposed[place] != output[position + place]:
                    break
                right[place] += 1
            table.read(token, is_generated=True)
    return [found / max(count, 1) for found, count in zip(right, all_places)]


def loaded(model: str, gears: str, directory: Path = Path()) -> tuple[Gearbox, Any]:
    """Return a gearbox, and its tokenizer. directory: for rewritten files, until the gearbox is gone."""
    if gears in (FILE, EIGHT):
        file = gguf_of(model)
        if gears == EIGHT:
            file = rewritten(file, directory / f"{named(model)}-q8_0.gguf", "Q8_0")
        module, tokenizer = load(str(file))
        return Gearbox(module), tokenizer
    module, tokenizer = load(str(folder() / Path(model).name) if model in MODELS else model)
    return Gearbox(module, gears), tokenizer


ALL = [
    *("smollm2:8", "smollm2:4", "qwen-0.5b:8", "qwen-0.5b:4", "qwen-0.5b:file", "qwen-0.5b:q8_0"),
    *("qwen-1.5b:8", "qwen-1.5b:4", "qwen-1.5b:file"),
]


@study("docs/performance.md", "README.md", minutes=30)
def prompt_lookup(
    models: list[str] = ALL,
    prompts: int = 6,
    max_tokens: int = 120,
) -> Found:
    """Time prompt lookup in models with one gear, by kind of prompt.

    Plain decoding, lookup in the same sequence, and lookup in earlier sequences too alternate in one process. The
    outputs of a kind follow each other as in a conversation.

    Args:
        models: Names as of `real-models`, with a gear's bits, `file` for the bits of the GGUF file, or `q8_0`.
        prompts: Number of prompts of each kind: chat, code, math, and edits that copy their source.
        max_tokens: Maximum number of tokens in an output.
    """
    rows, data = [], list[dict[str, Any]]()
    for each in models:
        model, _, gears = each.rpartition(":")
        with tempfile.TemporaryDirectory() as directory:
            gearbox, tokenizer = loaded(model, gears, Path(directory))
            of_model = [
                runs(gearbox, tokenizer, kind, texts, max_tokens) for kind, texts in prompts_by_kind(prompts).items()
            ]
        title, source = TITLES[named(model)]
        bits = {FILE: source, EIGHT: "Q8_0"}.get(gears, f"{gears} bits")
        for found in of_model:
            ratios = [found["speedup"][mode] for mode in MODES]
            places = ", ".join(f"{rate:.2f}" for rate in found["places"])
            rows.append([title, bits, found["kind"], places, *map(spread, ratios), found["identical"]])
        data.append({"model": each, "kinds": of_model})
    files = [each for each in data if each["model"].endswith(FILE)]
    short = [[*TITLES[named(each["model"].partition(":")[0])], *medians(each["kinds"])] for each in files]
    of_files = table(["model", "file", *prompts_by_kind(0)], short)
    head = ["model", "weights", "prompts", "correct predictions at position 1, 2, 3"]
    head += ["speedup, lookup in the same sequence", "in earlier sequences too", "outputs identical to plain decoding"]
    about = f"{prompts} prompts of each kind, up to {max_tokens} tokens; median (range)"
    return Found({"prompt_lookup": f"{table_here(head, rows)}\n{about}\n", "files_as_they_are": of_files}, data)


def medians(kinds: list[dict[str, Any]]) -> list[str]:
    """Return the median speedup of each kind of prompt, with lookup in earlier texts too."""
    return [f"{statistics.median(found['speedup']['earlier']):.2f}" for found in kinds]


def runs(gearbox: Gearbox, tokenizer: Any, kind: str, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Return the speedups of the modes for prompts of one kind, and how repetitive the outputs are."""
    modes: dict[str, Lossless | Static] = {"plain": Static(), **MODES}
    ways = {name: partial(written, gearbox, tokenizer, mode=mode, tokens=tokens) for name, mode in modes.items()}
    asked = [list(encode(tokenizer, prompt)) for prompt in prompts]
    speedup, texts, same = compared(ways, asked, tokens // 4, kind)
    return {
        "kind": kind,
        "speedup": speedup,
        "places": rates_at_places([*zip(asked, texts)]),
        "identical": f"{same} of {len(asked)}",
    }


def compared(
    ways: Mapping[str, Callable[..., tuple[list[int], float]]], prompts: Sequence[list[int]], warm_up: int, kind: str
) -> tuple[dict[str, list[float]], list[list[int]], int]:
    """Generate in each way in turn, after a warm-up.

    Args:
        ways: plain decoding as "plain", and others: functions from a prompt to output and seconds per token.
        warm_up: tokens that each way generates first, untimed.
        kind: of the prompts, for the progress bar.

    Returns:
        the speedup of each other way by prompt, the outputs, and the number of prompts with identical outputs.
    """
    for way in ways.values():
        way(prompts[0], tokens=warm_up)
    speedup: dict[str, list[float]] = {name: [] for name in ways if name != "plain"}
    texts, identical = list[list[int]](), 0
    for number, prompt in enumerate(track(prompts, kind)):
        done = {name: ways[name](prompt) for name in rotated([*ways], number)}
        text, plain = done["plain"]
        texts.append(text)
        identical += all(output == text for output, _ in done.values())
        for name, ratios in speedup.items():
            ratios.append(plain / done[name][1])
    return speedup, texts, identical


def rotated(names: list[str], by: int) -> Iterator[str]:
    """Yield names, first the one at place `by`, so that no way is always the first."""
    for place in range(len(names)):
        yield names[(place + by) % len(names)]


@study("docs/performance.md", minutes=15)
def long_edit(
    models: list[str] = ["qwen-0.5b:4,16", "qwen-0.5b:4", "qwen-1.5b:4"],  # noqa: B006
    max_tokens: int = 2000,
) -> Found:
    """Measure the speedup of prompt lookup in an edit that copies 2,000 tokens of code.

    Args:
        models: As in `prompt-lookup`.
        max_tokens: Maximum number of tokens in an output.
    """
    code = (ROOT / "gearbx_mlx" / "routing" / "ngrams.py").read_text()
    prompt = f"Rename the class NgramTable to SuccessorTable, and show all of the code again:\n\n```python\n{code}```"
    rows, data = [], list[dict[str, Any]]()
    for each in models:
        model, _, gears = each.rpartition(":")
        gearbox, tokenizer = loaded(model, gears)
        way = partial(written, gearbox, tokenizer, tokens=max_tokens)
        ways = {"plain": partial(way, mode=Static()), "lookup": partial(way, mode=Lossless(share_lookup=False))}
        speedup, (text,), same = compared(ways, [list(encode(tokenizer, prompt))], max_tokens // 32, model)
        data.append({"model": each, "speedup": speedup["lookup"], "tokens": len(text), "identical": same})
        weights, (ratio,) = f"{gears.rpartition(',')[2]} bits", speedup["lookup"]
        rows.append([TITLES[named(model)][0], weights, len(text), f"{ratio:.2f}", same])
    head = ["model", "weights", "tokens of the output", "speedup", "outputs identical to plain decoding"]
    return Found({"long_edit": table_here(head, rows)}, data)
