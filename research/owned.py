"""Gears in place of checkpoints that people own: SmolLM2 in 8, 6 and 4 bits of mlx-lm, beside stock mlx-lm."""

import gc
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, Static, load
from gearbx_mlx.files.smollm2 import smollm2_directory
from gearbx_mlx.gears.gearbox import attached

from .lossless import ASSISTANT, Writer, agreeing, first_prompts, times_faster, written_in_turn
from .studies import DATA, HELD_OUT, Found, in_turn, ratios, spread, study, table_here

OWN_TEXTS = DATA / "own_texts.jsonl"  # code to edit, texts to copy and to summarize, documents to quote
BITS = (8, 6, 4)
GEARS = {8: "4,8", 6: "4,6"}
GROUP = 64
LOADS = 9
Part = Literal["size", "speed", "agreement", "lookup", "low"]
PARTS: tuple[Part, ...] = get_args(Part)
Checkpoints = Mapping[int, str]
"""Bits to the directory of SmolLM2 in these bits."""


def converted(folder: Path) -> Checkpoints:
    """SmolLM2 as `mlx_lm.convert -q` writes it; what is there already stays."""
    made = {bits: folder / str(bits) for bits in BITS}
    for bits, path in made.items():
        if not path.exists():
            mlx_lm.convert(str(smollm2_directory()), str(path), quantize=True, q_bits=bits, q_group_size=GROUP)
    return {bits: str(path) for bits, path in made.items()}


@study("docs/formats.md", "research/tables.md", minutes=20)
def owned(
    parts: list[Part] = [*PARTS],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    max_tokens: int = 100,
    pairs: int = 3,
    keep: Path | None = None,
) -> Found:
    """What gears of a checkpoint's own codes take and gain, on SmolLM2 in 8, 6 and 4 bits.

    size: memory and time to load beside stock mlx-lm. speed: mode lossless beside the top gear alone. agreement: how
    often the prefix chooses the whole codes' token. lookup: prompt lookup in 4 bits alone. low: 4 bits as the low gear
    of the original.

    Args:
        num_prompts: Of GSM8K's held-out questions, and of a chat's.
        pairs: Trials of a prompt, whose median counts.
        keep: A folder for the checkpoints, which are then not made again.
    """
    measures = {"size": size, "speed": speed, "agreement": agreement, "lookup": lookup_alone, "low": low_gear}
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = converted(keep or Path(directory))
        texts = first_prompts(load(checkpoints[8])[1], [HELD_OUT, ASSISTANT], num_prompts)
        found = {part: measures[part](checkpoints, texts, max_tokens, pairs) for part in parts}
    tables = {f"owned_{part}": made for part, (made, _) in found.items()}
    return Found(tables, {part: data for part, (_, data) in found.items()})


def size(checkpoints: Checkpoints, texts: list[list[int]], tokens: int, pairs: int) -> tuple[str, Any]:
    """Bytes in memory, and seconds to load a model with its tokenizer."""
    rows, data = [], {}
    for bits, gears in GEARS.items():
        path = checkpoints[bits]
        stock = kept_and_most(lambda path=path: mlx_lm.load(path)[0])  # type: ignore[misc]
        ways: dict[str, Callable[[], Any]] = {"stock": lambda path=path: mlx_lm.load(path)}  # type: ignore[misc]
        for kernels in ("native", "mlx"):
            ways[kernels] = lambda path=path, gears=gears, kernels=kernels: geared(path, gears, kernels)  # type: ignore[misc]
        seconds = in_turn(ways, LOADS, before=forget)
        for kernels in ("native", "mlx"):
            own = kept_and_most(ways[kernels])
            slower = ratios(seconds[kernels], seconds["stock"])
            data[f"{bits} {kernels}"] = {"stock": stock, "own": own, "seconds": seconds}
            sizes = [f"{mine / theirs:.3f}" for mine, theirs in zip(own, stock)]
            rows.append([f"{bits} bits, gears {gears}, {kernels}", *sizes, spread(seconds[kernels]), spread(slower)])
    head = ["SmolLM2", "resident, over stock's", "peak, over stock's", "seconds to load", "over stock's"]
    return table_here(head, rows), data


def geared(path: str, gears: str, kernels: str) -> nn.Module:
    """A model in gears, as `generate` loads it."""
    model, _ = load(path, lazy=True)
    Gearbox(model, gears, kernels=kernels)
    return model


def kept_and_most(load_model: Callable[[], nn.Module]) -> tuple[int, int]:
    """The bytes of arrays that a model keeps in memory after a pass in each gear, and the most while it loads."""
    forget()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load_model()
    most = mx.get_peak_memory() - before
    box = attached(model)
    for gear in [None] if box is None else box.ladder:
        if box is not None and gear is not None:
            box.shift(gear)
        mx.eval(model(mx.array([[1, 2]])))
    forget()
    return mx.get_active_memory() - before, most


def forget() -> None:
    """Free all memory that no model uses."""
    gc.collect()
    mx.clear_cache()


def speed(checkpoints: Checkpoints, texts: list[list[int]], tokens: int, pairs: int) -> tuple[str, Any]:
    """Mode lossless beside the top gear alone."""
    rows, data = [], {}
    for bits, gears in GEARS.items():
        writer = Writer(checkpoints[bits], gears, None, Lossless())
        modes = {"without lookup": Lossless(lookup_tokens=0), "with lookup": writer.mode}
        ways = {name: partial(writer.written, mode) for name, mode in modes.items()}
        fewer = {name: times_fewer(writer, mode, texts, tokens) for name, mode in modes.items()}
        faster, same = beside(writer.alone, ways, texts, tokens, pairs)
        for name in ways:
            rows.append([f"{bits} bits, {gears}, {name}", spread(faster[name]), spread(fewer[name]), same[name]])
        data[bits] = {"faster": faster, "fewer bytes": fewer, "same": same}
    head = [
        f"SmolLM2, {len(texts)} prompts, {tokens} tokens",
        "times as fast as the top gear: median (range)",
        "times fewer bytes of weights a token",
        "texts identical",
    ]
    return table_here(head, rows), data


def times_fewer(writer: Writer, mode: Lossless, texts: list[list[int]], tokens: int) -> list[float]:
    """For each text: bytes of weights that a token reads in the top gear, over those that it reads in this mode."""
    box = writer.gearbox
    top = box.weight_bytes_per_token(box.ladder.top)
    found = []
    for prompt in texts:
        responses = [*writer.responses(mode, prompt, tokens)]
        found.append(top * len(responses) / sum(response.weight_bytes for response in responses))
    return found


def beside(
    alone: Callable[[list[int], int], tuple[list[int], float]],
    ways: Mapping[str, Callable[[list[int], int], tuple[list[int], float]]],
    texts: list[list[int]],
    tokens: int,
    pairs: int,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """For each way and text: its speed over that of `alone` in the same trial, the median; texts that agree."""
    found = written_in_turn({"alone": alone, **ways}, texts, tokens, pairs)
    first = found.pop("alone")
    same = {name: f"{agreeing(first, each)} of {len(texts)}" for name, each in found.items()}
    return {name: times_faster(first, each) for name, each in found.items()}, same


def agreement(checkpoints: Checkpoints, texts: list[list[int]], tokens: int, pairs: int) -> tuple[str, Any]:
    """How often the prefix of 4 bits, and mlx-lm's 4 bits, choose the token of the whole codes."""
    rows, data = [], {}
    for bits, gears in GEARS.items():
        writer = Writer(checkpoints[bits], gears, None, Lossless())
        written = [writer.alone(prompt, tokens)[0] for prompt in track(texts, f"{bits} bits")]
        shares = {"4-bit prefix": chosen_alike(writer, 4, texts, written)}
        shares["4 bits of mlx-lm"] = chosen_alike(Writer(checkpoints[4], "4", None, Lossless()), 4, texts, written)
        prefix, stock = (sum(map(sum, each)) / sum(map(len, each)) for each in shares.values())
        of_texts = [100 * (share(a) - share(b)) for a, b in zip(*shares.values())]
        error = statistics.stdev(of_texts) / len(of_texts) ** 0.5
        count = sum(map(len, written))
        more = f"{100 * (prefix - stock):+.1f} ± {error:.1f}"
        rows.append([f"{bits} bits, {count} tokens", f"{prefix:.3f}", f"{stock:.3f}", more])
        data[bits] = {name: [share(each) for each in alike] for name, alike in shares.items()}
    head = ["agreement with the whole codes", "their upper 4 bits", "4 bits of mlx-lm", "points more (standard error)"]
    return table_here(head, rows), data


def share(alike: list[bool]) -> float:
    return sum(alike) / len(alike)


def chosen_alike(writer: Writer, gear: int, prompts: list[list[int]], written: list[list[int]]) -> list[list[bool]]:
    """For each text and token: whether a gear chooses it after reading the text up to there."""
    writer.gearbox.shift(gear)
    found = []
    for prompt, text in zip(prompts, written):
        logits = writer.gearbox.model(mx.array([prompt + text[:-1]]))[0, len(prompt) - 1 :]
        chosen = mx.argmax(logits, axis=-1)
        found.append([token == own for token, own in zip(chosen.tolist(), text)])  # type: ignore[arg-type]
    return found


def lookup_alone(checkpoints: Checkpoints, texts: list[list[int]], tokens: int, pairs: int) -> tuple[str, Any]:
    """What prompt lookup gains with a single gear."""
    writer = Writer(checkpoints[4], "4", None, Lossless())
    repeating = first_prompts(writer.tokenizer, [OWN_TEXTS], [len(OWN_TEXTS.read_text().splitlines())])
    rows, data = [], {}
    for name, prompts in {"texts that repeat": repeating, "others": texts}.items():
        faster, same = beside(writer.alone, {name: writer.lossless}, prompts, tokens, pairs)
        rows.append([f"{name}, {len(prompts)}", spread(faster[name]), same[name]])
        data[name] = {"faster": faster[name], "same": same[name]}
    head = ["SmolLM2, 4 bits", "times as fast as without lookup: median (range)", "texts identical"]
    return table_here(head, rows), data


def low_gear(checkpoints: Checkpoints, texts: list[list[int]], tokens: int, pairs: int) -> tuple[str, Any]:
    """The original with its own low gear, and with the checkpoint of 4 bits as its low gear."""
    writers = {
        "4 bits of format planes": Writer("smollm2", "4,16", "planes", Lossless()),
        "4 bits of mlx-lm, --base": Writer("smollm2", "4,16", None, Lossless(), low_model=checkpoints[4]),
    }
    alone = next(iter(writers.values())).alone
    faster, same = beside(alone, {name: writer.lossless for name, writer in writers.items()}, texts, tokens, pairs)
    rows, data = [], {}
    for name, writer in writers.items():
        fewer = times_fewer(writer, writer.mode, texts, tokens)
        written = [writer.written(Static(), prompt, tokens)[0] for prompt in texts]
        alike = chosen_alike(writer, 4, texts, written)
        agreed = share([*itertools.chain(*alike)])
        rows.append([name, f"{agreed:.3f}", spread(faster[name]), spread(fewer), same[name]])
        data[name] = {"alike": [share(each) for each in alike], "faster": faster[name], "fewer bytes": fewer}
    head = [
        "SmolLM2 in bfloat16, drafts by",
        "agreement",
        "times as fast: median (range)",
        "times fewer bytes of weights a token",
        "texts identical",
    ]
    return table_here(head, rows), data
