"""What mode lossless would save in time on larger models: passes of random weights, drafts of a real model."""

from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless
from gearbx_mlx.benchmark.decode import random_model
from gearbx_mlx.cli.settings import check_choice
from gearbx_mlx.decoding.draft_trials import GearRecord, draft_times, record_agreement
from gearbx_mlx.kernels.dispatch import on_cpu
from gearbx_mlx.routing.acceptance import (
    AcceptanceCurve,
    LearnedAgreement,
    Recorded,
    fit_curve,
    typical_agreement,
    usual_agreement,
)
from gearbx_mlx.routing.rounds import LearnedCosts, predicted_cost

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

KINDS = ("smollm2 4,16", "smollm2 4,16, calibrated", "smollm2 6,16", "gearbx_mlx/demo_model 3,16")
PARTS = 7  # of the texts, one of which a(H) is learned from first: some 500 tokens


def records_of(writer: Writer, prompts: list[list[int]], tokens: int) -> list[GearRecord]:
    """Where the low gear agrees with the texts of the top gear."""
    box, found = writer.gearbox, []
    for prompt in track(prompts, "drafts"):
        text, _ = writer.alone(prompt, tokens)
        found += record_agreement(box, box.ladder.top, [box.ladder[0]], prompt, text)
    return found


def drafts_of(writer: Writer, asked: list[list[int]], tokens: int) -> Drafts:
    """The margins of drafted tokens, each with whether the top gear chooses the same token."""
    return [(each.margins, each.agrees) for each in records_of(writer, asked, tokens)]


def fitted(sequences: Recorded) -> AcceptanceCurve:
    entropies, agrees = (list(chain.from_iterable(column)) for column in zip(*sequences))
    return fit_curve(entropies, agrees)


@study("docs/lossless.md", "docs/formats.md", minutes=10)
def larger_shapes(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [12, 24],  # noqa: B006
    shapes: list[str] = [*SHAPES],  # noqa: B006
    max_tokens: int = 100,
    context: int = 100,
    gears: str = "4,16",
    drafts: Path | None = None,
) -> Found:
    """What mode lossless would save in time on larger models, if their drafts agreed as often as SmolLM2's.

    Passes are timed on random weights of each shape. Rounds are replayed on the margins and the agreement that
    SmolLM2's drafts show along its own texts, from the nearest 4-bit codes and from a calibrated base.

    Args:
        prompts: Files: one per line, or JSON Lines as in GSM8K.
        num_prompts: Of each file.
        shapes: Those of a CPU's table; on a GPU larger ones too.
        context: Tokens in the KV cache before a pass.
        drafts: A file for SmolLM2's drafts: recorded where it is missing, read where it is there.
    """
    known, every = {}, SHAPES | LARGE
    check_choice("shapes", shapes, tuple(every))
    if drafts is not None and drafts.exists():
        known = msgspec.json.decode(drafts.read_bytes(), type=dict[str, Drafts])
    else:
        for name, calibrated in (("nearest codes", False), ("a calibrated base", True)):
            writer = Writer("smollm2", gears, "planes", Lossless(), calibrated)
            known[name] = drafts_of(writer, first_prompts(writer.tokenizer, prompts, num_prompts), max_tokens)
        if drafts is not None:
            drafts.write_bytes(msgspec.json.encode(known))
    rows, figures = [], []
    for shape in shapes:
        box = Gearbox(random_model(COMMON | dict(zip(FIELDS, every[shape]))), gears, kernels="native")
        times = draft_times(box, box.ladder.top, box.ladder[0], context, known["nearest codes"], LearnedAgreement())
        costs = LearnedCosts((times.draft, dict(enumerate(times.verification, 1))))
        faster = [times.alone / predicted_cost(each, LearnedAgreement(), costs) for each in known.values()]
        parts = (times.draft, times.verification[3], times.verification[7])
        gigabytes = box.weight_bytes_per_token(box.ladder.top) / 1e9
        shown = [f"{seconds / times.alone:.2f}" for seconds in parts]
        rows.append([shape, f"{gigabytes:.2f}", f"{1e3 * times.alone:.1f}", *shown, *(f"{x:.2f}" for x in faster)])
        figures.append({"shape": shape, "times": msgspec.to_builtins(times), "faster": faster})
        del box
        mx.clear_cache()
    shares = ["a drafted token", "4 rows verified", "8 rows"]
    head = ["shape", "GB in 16 bits", "16 bits, ms a token", *shares, *(f"times as fast, {name}" for name in known)]
    block = "larger_shapes" if on_cpu() else "larger_shapes_gpu"
    return Found({block: table_here(head, rows)}, figures)


@study("docs/lossless.md", minutes=6)
def learned_agreement(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [12, 24],  # noqa: B006
    kinds: list[str] = [*KINDS],  # noqa: B006
    max_tokens: int = 100,
) -> Found:
    """What it is worth to learn from margins how often drafts agree, beside curves of the entropy.

    Rounds are replayed on drafts along the model's own texts, with the times of passes on this machine. A seventh of
    the texts, some 500 tokens, comes first: the calibrated a(H) is fitted to it, and a(m) has learned from it. The
    other texts count.

    Args:
        prompts: Files: one per line, or JSON Lines as in GSM8K.
        num_prompts: Of each file.
        kinds: Model, gears, and whether the base is calibrated.
    """
    rows, figures = [], []
    for kind in kinds:
        name = kind.removesuffix(", calibrated")
        model, gears = name.split(" ")
        writer = Writer(model, gears, "planes", Lossless(), calibrated=kind != name)
        box = writer.gearbox
        records = records_of(writer, first_prompts(writer.tokenizer, prompts, num_prompts), max_tokens)
        entropies, margins = ([(getattr(r, what), r.agrees) for r in records] for what in ("entropies", "margins"))
        times = draft_times(box, box.ladder.top, box.ladder[0], max_tokens, entropies, fitted(entropies))
        costs = LearnedCosts((times.draft, dict(enumerate(times.verification, 1))))
        learned = LearnedAgreement()
        predicted_cost(margins[::PARTS], learned, costs)
        ways: dict[str, tuple[Any, Recorded]] = {
            "2^(-H/4)": (typical_agreement, entropies),
            "a(H), calibrated": (fitted(entropies[::PARTS]), entropies),
            "a(m), not learned": (usual_agreement, margins),
            "a(m), learned": (learned, margins),
        }
        faster = {}
        for way, (curve, sequences) in ways.items():
            rest = [each for i, each in enumerate(sequences) if i % PARTS]
            faster[way] = times.alone / predicted_cost(rest, curve, costs)
        agrees = [right for _, each in entropies for right in each]
        share = sum(agrees) / len(agrees)
        rows.append([Path(kind).name, f"{share:.3f}", *(f"{value:.2f}" for value in faster.values())])
        figures.append({"kind": kind, "agreement": share, "faster": faster})
    return Found({"learned_agreement": table_here(["model, gears", "agreement", *faster], rows)}, figures)
