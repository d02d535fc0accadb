"""Estimated speedups of mode lossless on larger models: passes of random weights, drafts of a real model."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless
from gearbx_mlx.benchmark.decode import random_model
from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.decoding.drafters import DraftTarget
from gearbx_mlx.decoding.drafters.low_gear import LowGear, rescoring, rescoring_head
from gearbx_mlx.decoding.policy import MAX_ROWS, FixedPolicy, LearnedPolicy
from gearbx_mlx.decoding.response import GeneratedText
from gearbx_mlx.decoding.rows import Verification, Verifier
from gearbx_mlx.decoding.sampling import GREEDY, reader_of
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.kernels.dispatch import on_cpu
from gearbx_mlx.settings import check_choice

from .lossless import ASSISTANT, Writer, first_prompts
from .studies import HELD_OUT, Found, study, table_here

COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
FIELDS = (
    *("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)
SHAPES = {
    "SmolLM2-135M": ("llama", 576, 30, 1536, 9, 3, 49152),
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 4864, 14, 2, 151936),
    "Llama-3.2-1B": ("llama", 2048, 16, 8192, 32, 8, 128256),
}
LARGE = {
    "Llama-3.1-8B": ("llama", 4096, 32, 14336, 32, 8, 128256),
    "Qwen2.5-14B": ("qwen2", 5120, 48, 13824, 40, 8, 152064),
}
Drafts = list[tuple[list[float], list[bool]]]
"""Of each text the margins of drafted tokens, and whether the top gear chooses the same token."""
BLOCK = 8  # tokens that a gear reads on the top gear's cache before it is put right again: the length of a usual draft
TRIALS, LOOP = 9, 8  # of passes, after one that does not count; tokens of mlx-lm's own loop


def drafts_of(writer: Writer, asked: list[list[int]], tokens: int) -> Drafts:
    """Return the low gear's drafts along the outputs of the top gear."""
    found = []
    for prompt in track(asked, "drafts"):
        text, _ = writer.alone(prompt, tokens)
        found.append(drafts_along(writer.gearbox, prompt, text))
    return found


def drafts_along(box: Gearbox, prompt: list[int], text: list[int]) -> tuple[list[float], list[bool]]:
    """Return the low gear's margins along the top gear's output and KV cache, and whether both choose one token."""
    low, top, reader = box.ladder[0], box.ladder.top, reader_of(box)
    cache = make_prompt_cache(box.model)
    box.shift(top)
    if len(prompt) > 1:
        box.model(mx.array(prompt[:-1])[None], cache=cache)
    inputs, margins, agrees = [prompt[-1], *text[:-1]], list[float](), list[bool]()
    for start in range(0, len(inputs), BLOCK):
        block, before = mx.array(inputs[start : start + BLOCK])[None], Snapshot(cache)
        box.shift(low)
        with rescoring(rescoring_head(box, low)):
            logits = box.model(block, cache=cache)[0]
        before.restore()
        margins += np.array(reader.best(logits)[1]).tolist()
        agrees += np.array(mx.argmax(logits, axis=-1) == mx.array(text[start : start + BLOCK])).tolist()
        box.shift(top)
        mx.eval(box.model(block, cache=cache))
    return margins, agrees


DRAFTED = 4  # tokens of a draft that is timed


class TimedPasses:
    """Passes over a KV cache with so many tokens, each of which returns the seconds that it took."""

    def __init__(self, gearbox: Gearbox, top: Gear, draft: Gear, context: int):
        self.gearbox, self.top = gearbox, top
        gearbox.make(draft)
        gearbox.shift(top)
        self._size, self.cache = vocabulary(gearbox.model), make_prompt_cache(gearbox.model)
        mx.eval(gearbox.model(mx.arange(context)[None] % self._size, cache=self.cache))
        self._verifier = Verifier(gearbox, top)
        self._drafter = LowGear(DraftTarget(gearbox, self.cache, GREEDY, reader_of(gearbox)), draft)

    def drafted(self) -> float:
        """Return a token of a draft that is chosen greedily."""
        begun = time.perf_counter()
        self._drafter.propose(GeneratedText([1]), DRAFTED, FixedPolicy(DRAFTED + 1))
        return (time.perf_counter() - begun) / DRAFTED

    def verified(self, rows: int) -> float:
        """Return a verification."""
        begun = time.perf_counter()
        mx.eval(Verification(self._verifier, [row % self._size for row in range(rows)], self.cache).logits)
        return time.perf_counter() - begun

    def seconds(self, trials: Sequence[Callable[[], float]], count: int) -> list[list[float]]:
        """Of each of the trials, which take turns `count` times, after one that compiles and fills caches.

        The top gear is then engaged.
        """
        before, seconds = Snapshot(self.cache), [list[float]() for _ in trials]
        for _ in range(count + 1):
            for trial, found in zip(trials, seconds):
                with before.borrowed():
                    found.append(trial())
        self.gearbox.shift(self.top)
        return [found[1:] for found in seconds]


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a token of the top gear in mlx-lm's loop, of a drafted token, and of verifications by rows."""

    alone: float
    draft: float
    rows: list[float]

    @classmethod
    def of(cls, box: Gearbox, context: int) -> "PassSeconds":
        """Return medians of trials in turn, after so many tokens."""
        passes = TimedPasses(box, box.ladder.top, box.ladder[0], context)

        def alone() -> float:
            box.shift(box.ladder.top)
            loop = generate_step(mx.array([1]), box.model, max_tokens=LOOP, prompt_cache=passes.cache)
            begun = [time.perf_counter() for _ in loop]
            mx.eval([layer.state for layer in passes.cache])  # the loop has begun one token more
            return (begun[-1] - begun[0]) / (LOOP - 1)

        verified = [partial(passes.verified, rows) for rows in range(1, MAX_ROWS + 1)]
        seconds = passes.seconds([alone, passes.drafted, *verified], TRIALS)
        first, token, *rows = map(statistics.median_low, seconds)
        return cls(first, token, rows)

    def kept(self) -> dict[str, float]:
        """Return the costs that a policy knows at the next start."""
        one, more = self.rows[0], statistics.mean(later - before for before, later in itertools.pairwise(self.rows[:8]))
        return {"drafted token": (self.draft + more) / one, "plain token": self.alone / one}

    def replayed(self, drafts: Drafts) -> float:
        """Return seconds of a token of the loop, replayed on recorded drafts; a(m) learns from them."""
        policy, spent, written = LearnedPolicy(self.kept()), 0.0, 0
        for margins, agrees in drafts:
            place = 0
            while place < len(margins):
                drafted, most = 0, policy.length(len(margins) - place - 1, early=True)
                while drafted < most:
                    drafted += 1
                    if not policy.goes_on(margins[place : place + drafted]):
                        break
                accepted = next((i for i in range(drafted) if not agrees[place + i]), drafted)
                seconds, rows = drafted * self.draft + self.rows[drafted], drafted + 1
                if drafted:
                    how: dict[str, Any] = {"seconds": seconds, "margins": margins[place : place + drafted]}
                    policy.add_round(drafted=drafted, accepted=accepted, tokens=accepted + 1, rows=rows, **how)
                else:
                    seconds = self.alone
                    policy.add_plain(seconds)
                spent += seconds
                place += accepted + 1
            written += place
        return spent / written


@study("research/tables.md", "docs/kernels.md", minutes=10)
def larger_shapes(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [12, 24],  # noqa: B006
    shapes: list[str] = [*SHAPES],  # noqa: B006
    max_tokens: int = 100,
    context: int = 100,
    gears: str = "4,16",
    drafts: Path | None = None,
) -> Found:
    """Estimate the speedup of mode lossless on larger models, with SmolLM2's acceptance of drafts.

    Passes are timed on random weights of each shape. Rounds are replayed with the margins and the acceptance of
    SmolLM2's drafts along its own outputs, by RTN and by a GPTQ-calibrated base.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        shapes: Names of shapes; larger ones are for GPUs.
        context: Tokens in the KV cache before a pass.
        drafts: File of SmolLM2's drafts; recorded if missing, else read.
    """
    known, every = {}, SHAPES | LARGE
    check_choice("shapes", shapes, tuple(every))
    if drafts is not None and drafts.exists():
        known = msgspec.json.decode(drafts.read_bytes(), type=dict[str, Drafts])
    else:
        for name, calibrated in (("RTN drafts", False), ("GPTQ-calibrated drafts", True)):
            writer = Writer("smollm2", gears, "planes", Lossless(), calibrated)
            known[name] = drafts_of(writer, first_prompts(writer.tokenizer, prompts, num_prompts), max_tokens)
        if drafts is not None:
            drafts.write_bytes(msgspec.json.encode(known))
    rows, figures = [], []
    for shape in shapes:
        box = Gearbox(random_model(COMMON | dict(zip(FIELDS, every[shape]))), gears, kernels="native")
        times = PassSeconds.of(box, context)
        faster = [times.alone / times.replayed(each) for each in known.values()]
        parts = (times.draft, times.rows[3], times.rows[7])
        gigabytes = box.weight_bytes_per_token(box.ladder.top) / 1e9
        shown = [f"{seconds / times.alone:.2f}" for seconds in parts]
        rows.append([shape, f"{gigabytes:.2f}", f"{1e3 * times.alone:.1f}", *shown, *(f"{x:.2f}" for x in faster)])
        figures.append({"shape": shape, "times": asdict(times), "faster": faster})
        del box
        mx.clear_cache()
    shares = ["drafted token", "4 rows verified", "8 rows"]
    head = ["shape", "GB, 16 bits", "16 bits, ms/token", *shares, *(f"speedup, {name}" for name in known)]
    block = "larger_shapes" if on_cpu() else "larger_shapes_gpu"
    return Found({block: table_here(head, rows)}, figures)
