"""A mixture of experts that writes SmolLM2's texts: what drafts gain where rows of a pass read different weights."""

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import save_model
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, load
from gearbx_mlx.benchmark.decode import random_model
from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.decoding.rows import Rows, Verifier
from gearbx_mlx.files.smollm2 import smollm2_directory

from .lossless import ASSISTANT, Writer, agreeing, first_prompts, times_faster, written_in_turn
from .shapes import DRAFTED, TimedPasses
from .studies import HELD_OUT, TALES, Found, in_turn, ratios, spread, study, table_here

CHOSEN = 2  # experts of a token
ROWS = (1, 2, 4, 8)
READ = 384  # tokens from which the routers are made: half of them set the mean, the other half shows who is chosen
CONTEXT = 100
TRIALS = 9


def mlp_inputs(model: Any, tokens: Sequence[int]) -> list[np.ndarray]:
    """What the MLP of each block of a Llama reads along a text: (tokens, width) each."""
    inner = model.model
    x, found = inner.embed_tokens(mx.array([tokens])), []
    mask = create_attention_mask(x, None)
    for block in track(inner.layers, "blocks"):
        x = x + block.self_attn(block.input_layernorm(x), mask)
        read = block.post_attention_layernorm(x)
        x = x + block.mlp(read)
        found.append(np.array(read[0].astype(mx.float32)))
    return found


def router(read: np.ndarray, experts: int, seed: int) -> np.ndarray:
    """Random directions (experts, width) at right angles to the mean, so that no expert is preferred everywhere."""
    mean = read.mean(0) / np.linalg.norm(read.mean(0))
    random = np.random.default_rng(seed).standard_normal((experts, read.shape[1])).astype(np.float32)
    random -= np.outer(random @ mean, mean)
    return random / np.linalg.norm(random, axis=1, keepdims=True)


def distinct(read: np.ndarray, by: np.ndarray, rows: int) -> float:
    """How many experts `rows` neighbouring tokens choose on average."""
    chosen = np.argsort(-(read @ by.T), axis=1)[:, :CHOSEN]
    return float(np.mean([len(np.unique(chosen[at : at + rows])) for at in range(0, len(chosen) - rows + 1)]))


def upcycled(experts: int, to: Path) -> list[float]:
    """Write SmolLM2 as a Mixtral whose experts are copies of its MLPs. Returns `distinct` of its blocks, for ROWS.

    Sparse upcycling (Komatsuzaki et al., 2022, arXiv 2212.05055). The shares of the experts of a token sum to 1, so
    that every block computes what SmolLM2's does.
    """
    directory = smollm2_directory()
    model, tokenizer = load(str(directory))
    text = TALES.read_text(encoding="utf-8")
    inputs = mlp_inputs(model, tokenizer.encode(text[: 8 * READ], verbose=False)[:READ])
    args = model.args
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    names += ["num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    config = {name: getattr(args, name) for name in names} | {"model_type": "mixtral"}
    config |= {"num_local_experts": experts, "num_experts_per_tok": CHOSEN}
    made = random_model(config)
    inner, counts = made.model, []
    inner.embed_tokens, inner.norm = model.model.embed_tokens, model.model.norm
    for number, (block, own, read) in enumerate(zip(inner.layers, model.model.layers, inputs)):
        first, last = np.split(read, 2)
        by = router(first, experts, number)
        counts.append([distinct(last, by, rows) for rows in ROWS])
        block.input_layernorm, block.post_attention_layernorm = own.input_layernorm, own.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(block.self_attn, name, getattr(own.self_attn, name))
        mixture = block.block_sparse_moe
        mixture.gate.weight = mx.array(by).astype(mx.bfloat16)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(mixture.switch_mlp, name).weight = mx.stack([getattr(own.mlp, name).weight] * experts)
    save_model(to, made)
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in directory.glob("*token*"):
        shutil.copy(file, to)
    return [float(each) for each in np.mean(counts, 0)]


def pass_ratios(gearbox: Gearbox, text: Sequence[int]) -> dict[str, float]:
    """A drafted token, and verifications of ROWS: multiples of a token of the top gear, medians of trials in turn."""
    passes = TimedPasses(gearbox, gearbox.ladder.top, gearbox.ladder[0], CONTEXT)
    verifier, before = Verifier(gearbox, gearbox.ladder.top), Snapshot(passes.cache)

    def verified(rows: int) -> None:
        with before.borrowed():
            mx.eval(Rows(verifier, mx.array([text[:rows]]), passes.cache).logits)

    def drafted() -> None:
        with before.borrowed():
            passes.drafted()

    works: dict[Any, Any] = {rows: partial(verified, rows) for rows in ROWS}
    seconds = in_turn({"draft": drafted, **works}, TRIALS)
    shares = {name: statistics.median(ratios(each, seconds[1])) for name, each in seconds.items() if name != 1}
    return shares | {"draft": shares["draft"] / DRAFTED}


@study("docs/lossless.md", minutes=15)
def lossless_experts(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    experts: list[int] = [1, 4, 8],  # noqa: B006
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """What mode lossless saves on a mixture of experts, whose verified rows read different weights.

    SmolLM2 becomes a Mixtral: each expert is a copy of the block's MLP, and a random router chooses two for a token,
    so that texts and drafts are SmolLM2's, and only the weights that a pass reads differ. A trained router's neighbours
    choose more alike.

    Args:
        prompts: Files: one per line, or JSON Lines as in GSM8K.
        num_prompts: Of each file.
        experts: Of a block; 1 is SmolLM2 itself.
        pairs: Trials of a prompt, whose median counts.
    """
    rows, data = [], []
    for count in experts:
        with tempfile.TemporaryDirectory() as directory:
            chosen = upcycled(count, Path(directory)) if count > 1 else [1.0] * len(ROWS)
            writer = Writer(directory if count > 1 else "smollm2", "4,16", "planes", Lossless())
            asked = first_prompts(writer.tokenizer, prompts, num_prompts)
            found = written_in_turn({"alone": writer.alone, "lossless": writer.lossless}, asked, max_tokens, pairs)
            faster = times_faster(found["alone"], found["lossless"])
            same = agreeing(found["alone"], found["lossless"])
            passes = pass_ratios(writer.gearbox, asked[0])
            shown = [f"{share:.2f}" for share in passes.values()]
            picked = [f"{each:.1f}" for each in chosen[1:]] if count > 1 else [""] * (len(ROWS) - 1)
            rows.append([count, *picked, *shown, spread(faster), f"{same} of {len(asked)}"])
            data.append({"experts": count, "chosen": chosen, "passes": passes, "faster": faster, "same": same})
            print(*rows[-1], flush=True)
    head = ["experts", *(f"chosen by {count} rows" for count in ROWS[1:]), "a drafted token"]
    head += [*(f"{count} rows verified" for count in ROWS[1:]), "times as fast: median (range)", "texts identical"]
    return Found({"lossless_experts": table_here(head, rows)}, data)
