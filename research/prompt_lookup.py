"""Prompt lookup as the only drafter, for models with one gear."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, Static, load
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.routing.ngrams import NgramTable

from .lossless import ASSISTANT, encode
from .policy_regret import OWN_TEXTS
from .real_models import MODELS, folder, gguf_of
from .starts import TITLES, written
from .studies import HELD_OUT, Found, named, spread, study, table, table_here

FILE = "file"  # in place of gears: the GGUF file's own bits
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


def loaded(model: str, gears: str) -> tuple[Gearbox, Any]:
    """Return a gearbox with one gear, and its tokenizer."""
    if gears == FILE:
        module, tokenizer = load(str(gguf_of(model)))
        return Gearbox(module), tokenizer
    module, tokenizer = load(str(folder() / Path(model).name) if model in MODELS else model)
    return Gearbox(module, gears), tokenizer


@study("docs/performance.md", "README.md", minutes=12)
def prompt_lookup(
    models: list[str] = ["smollm2:8", "smollm2:4", "qwen-0.5b:file", "qwen-1.5b:file"],  # noqa: B006
    prompts: int = 8,
    max_tokens: int = 120,
) -> Found:
    """Time prompt lookup in models with one gear, by kind of prompt.

    Plain decoding, lookup in the same sequence, and lookup in earlier sequences too alternate in one process. The
    outputs of a kind follow each other as in a conversation.

    Args:
        models: Names as of `real-models`, with a gear's bits, or `file` for the bits of the GGUF file.
        prompts: Number of prompts of each kind: chat, code, math, and edits that copy their source.
        max_tokens: Maximum number of tokens in an output.
    """
    rows, data = [], list[dict[str, Any]]()
    for each in models:
        model, _, gears = each.rpartition(":")
        gearbox, tokenizer = loaded(model, gears)
        of_model = [
            runs(gearbox, tokenizer, kind, texts, max_tokens) for kind, texts in prompts_by_kind(prompts).items()
        ]
        title, source = TITLES[named(model)]
        bits = source if gears == FILE else f"{gears} bits"
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
    ways: dict[str, Any] = {"plain": Static(), **MODES}
    asked = [list(encode(tokenizer, prompt)) for prompt in prompts]
    for way in ways.values():
        written(gearbox, tokenizer, asked[0], way, tokens // 4)
    speedup: dict[str, list[float]] = {mode: [] for mode in MODES}
    texts, identical = [], 0
    for number, prompt in enumerate(track(asked, kind)):
        done = {name: written(gearbox, tokenizer, prompt, ways[name], tokens) for name in rotated([*ways], number)}
        text, plain = done["plain"]
        texts.append((prompt, text))
        identical += all(output == text for output, _ in done.values())
        for mode in MODES:
            speedup[mode].append(plain / done[mode][1])
    same = f"{identical} of {len(asked)}"
    return {"kind": kind, "speedup": speedup, "places": rates_at_places(texts), "identical": same}


def rotated(names: list[str], by: int) -> Iterator[str]:
    """Yield names, first the one at place `by`, so that no way is always the first."""
    for place in range(len(names)):
        yield names[(place + by) % len(names)]
