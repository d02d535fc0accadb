"""Prefill gears, and fidelity of each mode on a real model, for research/evidence.md."""

import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, Kickdown, Lossless, Route, Static, load, stream_generate
from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.decoding.mode import Mode
from gearbx_mlx.evaluation.predictions import kl_divergence, next_logprobs
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.routing.gates import default_thresholds
from gearbx_mlx.telemetry.trace import get_pyplot, save

from .evaluation.report import change_of_kl
from .lossless import ASSISTANT, first_prompts, generated, times_faster, written_in_turn
from .policies import policies
from .studies import HELD_OUT, Found, in_turn, named, ratios, spread, study, table_here

LADDER = "4,5,6,8,16"
MIXTURES = ("random", "route", "kickdown")


@study("research/evidence.md", minutes=25)
def prompt_gear(
    text: Path,
    model: str = "smollm2",
    prompt_tokens: int = 256,
    text_tokens: int = 64,
    windows: int = 24,
    trials: int = 7,
    out: str = "",
) -> Found:
    """Measure the effect of the prefill gear: KL of the text after the prompt, bytes, and time to the first token.

    Every gear prefills the prompt once in itself and once in the top gear. Then every mix of 4 and 16 bits follows a
    prompt that the top gear prefilled.

    Args:
        text: Text to read in consecutive windows; the page uses WikiText-2's test set.
        text_tokens: Tokens after each prompt.
        trials: Trials of the time to the first token.
        out: Directory for the reports; none: not kept.
    """
    place = Path(out or tempfile.mkdtemp())
    settings: dict[str, Any] = {
        "model": model,
        "gears": LADDER,
        "format": "affine",
        "prompt_tokens": prompt_tokens,
        "context": prompt_tokens + 1 + text_tokens,
        "tokens": windows * text_tokens,
        "kernels": "auto",
    }
    alone: dict[str, Any] = {"policy": ["static"], "share": "0.5"}
    same = policies(text, out=place / "same", prompt_gear="same", **alone, **settings).data
    eight = policies(text, out=place / "eight", prompt_gear="8", **alone, **settings).data
    precise = policies(text, out=place / "top", policy=["static", *MIXTURES], share="0.125,0.25,0.5", **settings).data
    of_same, of_eight, rows = ({row["name"]: row for row in each["policies"]} for each in (same, eight, precise))
    first = first_tokens(model, text, prompt_tokens, trials)
    gears = [
        [
            name.removeprefix("static-"),
            f"{row['effective_bits']:.2f}",
            *(f"{each[name]['kl_mean']:.4f}" for each in (of_same, of_eight, rows)),
            f"{row['kl_mean'] / of_same[name]['kl_mean']:.2f}",
            *(spread(times) for times in first[name]),
        ]
        for name, row in rows.items()
        if row["policy"] == "static" and name in first
    ]
    head = [
        "bits",
        "bits read per weight",
        "KL, prefill in the same gear",
        "in the 8-bit gear",
        "in the 16-bit gear",
        "KL, 16 over the same",
        "time to first token, 8 over the same",
        "16 over the same",
    ]
    mixed = [
        [
            row["name"],
            f"{row['effective_bits']:.2f}",
            f"{row['kl_mean']:.4f}",
            "" if row["policy"] == "random" else change_of_kl(row["against_random_same_share"]),
            "" if row["policy"] == "random" else change_of_kl(row["against_random_same_bytes"]),
            row["better_static"] or "none",
        ]
        for row in rows.values()
        if row["policy"] in MIXTURES
    ]
    mixed_head = [
        "mixed 4 and 16",
        "bits read per weight",
        "KL",
        "vs chance",
        "at its bytes",
        "better static",
    ]
    tables = {"prompt_gear": table_here(head, gears), "prompt_mixtures": table_here(mixed_head, mixed)}
    return Found(tables, {"same": same, "precise": precise, "first": first})


def first_tokens(model: str, text: Path, prompt_tokens: int, trials: int) -> dict[str, list[list[float]]]:
    """Return, by static gear: time to first token with 8- and 16-bit prefill, relative to the gear's own prefill."""
    loaded, tokenizer = load(model)
    box = Gearbox(loaded, LADDER, format="affine")
    prompt = tokenizer.encode(text.read_text(encoding="utf-8"), verbose=False)[:prompt_tokens]
    found = {}
    for gear in box.ladder[:-1]:
        modes = {reads: Static(gear.bits, prompt_gear=reads) for reads in ("same", "8", "16")}
        works = {reads: partial(write, (box, mode), tokenizer, prompt, 1) for reads, mode in modes.items()}
        seconds = in_turn(works, trials)
        found[f"static-{gear.bits}"] = [ratios(seconds[reads], seconds["same"]) for reads in ("8", "16")]
    return found


TURNS = (
    "Tell me about the moon.",
    "How far away is it?",
    "Could people live there?",
    "What would they eat?",
    "How would they get water?",
    "What would be the hardest thing?",
    "Write two sentences of a story about it.",
    "Give the story a title.",
)


@study("research/evidence.md", minutes=3)
def conversation(model: str = "smollm2", low: int = 4, max_tokens: int = 64) -> Found:
    """Measure the effect on a chat if low-gear answers are prefilled again in the top gear with the next question.

    The top gear generates the conversation. The low gear then follows its answers, with three KV caches of the earlier
    turns. They are computed by the low gear; by the top gear for questions, and as generated for answers; or by the
    top gear, as in `chat` and the server. KL is from the top gear's distributions.
    """
    loaded, tokenizer = load(model)
    box = Gearbox(loaded, f"{low},16", format="affine")
    messages: list[dict[str, str]] = []
    parts: list[tuple[list[int], list[int]]] = []  # of each turn: what is read before the answer, and the answer
    known = 0
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        answer = [r.token for r in stream_generate(loaded, tokenizer, prompt, max_tokens, gearbox=box, mode=Static())]
        parts.append((prompt[known:], answer))
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        known = len(prompt) + len(answer)
    reads = {"all in the low gear": (low, low), "questions in 16": (16, low), "all in 16, read again": (16, 16)}
    reference = followed(box, parts, 16, 16, 16)
    found = {}
    for name, gears in reads.items():
        answers_by_low = followed(box, parts, low, *gears)
        found[name] = [float(kl_divergence(p, q).mean()) for p, q in zip(reference, answers_by_low)]
    rows = [[name, *(f"{each:.3f}" for each in [*turns, statistics.fmean(turns)])] for name, turns in found.items()]
    head = [f"{named(model)}, {low} bits: KL of the answer to question", *map(str, range(1, len(TURNS) + 1)), "mean"]
    return Found({"conversation": table_here(head, rows)}, found)


def followed(
    box: Gearbox, parts: list[tuple[list[int], list[int]]], writes: int, questions: int, answers: int
) -> list[np.ndarray]:
    """Log-probabilities (n, V) along each answer in one gear, over a KV cache with entries of two others."""
    cache, found = make_prompt_cache(box.model), []
    for question, answer in parts:
        box.shift(questions)
        mx.eval(box.model(mx.array([question[:-1]]), cache=cache))
        box.shift(writes)
        with Snapshot(cache).borrowed():
            found.append(next_logprobs(box.model, [question[-1], *answer[:-1]], cache))
        box.shift(answers)
        mx.eval(box.model(mx.array([[question[-1], *answer]]), cache=cache))
    return found


@study("research/evidence.md", writes="docs/images/fidelity.png", minutes=30)
def fidelity(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [12, 24],  # noqa: B006
    model: str = "smollm2",
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Compare static gears, mixed gears and lossless: distance from the top gear against bytes and time.

    Every method generates greedily after each prompt. The top gear then reads the output: the regret of a token is by
    how many nats it is less likely than the top gear's best token.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        pairs: Trials of a prompt; the median counts.
    """
    ways, tokenizer = ways_of(model)
    asked = first_prompts(tokenizer, prompts, num_prompts)
    works = {name: partial(write, way, tokenizer) for name, way in ways.items()}
    found = written_in_turn(works, asked, max_tokens, pairs)
    regret, read = {}, {}
    for name, each in found.items():
        texts = [trials[-1][0] for trials in each]
        regret[name] = [regrets(ways[TOP][0], prompt, text) for prompt, (text, _) in zip(asked, texts)]
        read[name] = statistics.fmean(count for _, count in texts)
    faster = {name: times_faster(found[TOP], each) for name, each in found.items()}
    points = {
        name: {
            "regret": statistics.fmean(float(lost.mean()) for lost in regret[name]),
            "agreed": statistics.fmean(float((lost == 0).mean()) for lost in regret[name]),
            "fewer_bytes": read[TOP] / read[name],
            "faster": statistics.median(faster[name]),
        }
        for name in ways
    }
    rows = [
        [name, f"{one['regret']:.4f}", f"{one['agreed']:.3f}", f"{one['fewer_bytes']:.2f}", spread(faster[name])]
        for name, one in points.items()
    ]
    head = [
        f"{named(model)}, {len(asked)} prompts, {max_tokens} tokens",
        "loss, nats per token",
        "top-1 agreement",
        "times fewer bytes",
        "speedup: median (range)",
    ]
    return Found({"fidelity": table_here(head, rows)}, points, {"fidelity.png": partial(draw, points)})


TOP = "16 bits"
SAME = ", prompt in the same"
Way = tuple[Gearbox, Mode]


def ways_of(model: str) -> tuple[dict[str, Way], Any]:
    """Return each way to write, and the tokenizer."""
    (loaded, tokenizer), (other, _) = load(model), load(model)
    box, drafting = Gearbox(loaded, LADDER, format="affine"), Gearbox(other, "4,16", format="planes")
    low = default_thresholds(2, vocabulary(loaded))
    modes: dict[str, Mode] = {TOP: Static(16)}
    modes |= {f"{bits} bits": Static(bits) for bits in (8, 6, 5, 4)}
    modes |= {f"{bits} bits{SAME}": Static(bits, prompt_gear="same") for bits in (6, 5, 4)}
    of_two: dict[str, Mode] = {"route 4,16": Route(low), "kickdown 4,16": Kickdown(low), "lossless": Lossless()}
    one, two = ({name: (each, mode) for name, mode in own.items()} for each, own in ((box, modes), (drafting, of_two)))
    return one | two, tokenizer


def write(way: Way, tokenizer: Any, prompt: list[int], tokens: int) -> tuple[tuple[list[int], float], float]:
    """Return the tokens of a text with the bytes of weights of one, and the seconds of one (after the first)."""
    box, mode = way
    responses = stream_generate(box.model, tokenizer, prompt, tokens, gearbox=box, mode=mode)
    text, seconds = generated(responses)
    return (text, responses.summary()["weight_bytes_per_token"]), seconds


def regrets(box: Gearbox, prompt: list[int], text: list[int]) -> np.ndarray:
    """Return by how many nats each token is less likely than the top gear's best one, in one pass over all tokens."""
    box.shift(box.ladder.top)
    logprobs = next_logprobs(box.model, [*prompt, *text[:-1]], None)[len(prompt) - 1 :]
    return logprobs.max(axis=-1) - logprobs[range(len(text)), text]


FAMILIES = {  # by the first word of a way: its colour, its mark, and where its label stands, in points
    "lossless": ("#1a7f37", "*", (0, 10)),
    "route": ("#bc4c00", "v", (0, 9)),
    "kickdown": ("#bc4c00", "^", (0, 9)),
}
ONE_GEAR = ("#0969da", "o", (0, 9))
SMALLEST = 1e-3  # nats: below, the scale is linear, so that it has a zero
TICKS = (0, 1e-3, 1e-2, 1e-1)


def draw(points: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw regret against bytes and against time, both as times what the top gear alone takes.

    Texts whose prompt a low gear has read are in the table alone: they lie beside the others.
    """
    plt = get_pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    titles = {"fewer_bytes": "times fewer bytes of weights than 16 bits", "faster": "times as fast as 16 bits"}
    for axes, (column, title) in zip(panels, titles.items()):
        for name, point in points.items():
            if not name.endswith(SAME):
                draw_way(axes, name, point[column], point["regret"])
        axes.set_yscale("symlog", linthresh=SMALLEST)
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
        axes.margins(x=0.12)
        axes.set_ylim(-SMALLEST / 3, 1)
        axes.set_xlabel(f"{title} \N{RIGHTWARDS ARROW} better")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("better \N{LEFTWARDS ARROW} nats given up a token")
    save(figure, path, dpi=120)


def draw_way(axes: Any, name: str, x: float, y: float) -> None:
    colour, mark, place = FAMILIES.get(name.split()[0], ONE_GEAR)
    axes.plot(x, y, mark, color=colour, markersize=13 if mark == "*" else 8)
    axes.annotate(name, (x, y), xytext=place, textcoords="offset points", fontsize=10, color=colour, ha="center")
