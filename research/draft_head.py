"""A draft head: share of correct drafts after training, and speedup, by kind of prompt."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from pages import table

from gearbx_mlx import Lossless, Static
from gearbx_mlx.cli.flags import ModelSettings
from gearbx_mlx.decoding.head_files import read_head
from gearbx_mlx.draft_head import DraftHeadSettings, PromptTextSettings, TrainingSettings
from gearbx_mlx.draft_head.answers import MAX_HELD_OUT
from gearbx_mlx.draft_head.layer import PLACES
from gearbx_mlx.draft_head.prompts import sources
from gearbx_mlx.draft_head.run import prepare, trained
from gearbx_mlx.draft_head.training import tokens_a_round

from .lossless import encode
from .prompt_lookup import compared, loaded, prompts_by_kind
from .starts import TITLES, written
from .studies import Found, named, spread, study, table_here


@study("docs/heads.md", writes="a head in --out", minutes=60)
def draft_head(model: str = "smollm2", minutes: float = 60.0, out: str = "draft-head-smollm2") -> Found:
    """Train a head on a model's own answers, and measure correct drafts by kind of prompt on held-out answers."""
    training = TrainingSettings(out=out, minutes=minutes)
    settings = DraftHeadSettings(ModelSettings(model=model), PromptTextSettings(), training)
    prepared = prepare(settings)
    if prepared.trainer.seconds < prepared.seconds:
        trained(settings, prepared)
    trainer, rows = prepared.trainer, {}
    made = {kind: {text for _, text in zip(range(2000), source)} for kind, source in sources().items()}
    held = trainer.held[:MAX_HELD_OUT]
    for kind, texts in {**made, "all": {*prepared.texts}}.items():
        own = [each for each in held if prepared.texts[each.number] in texts]
        if own:
            rows[kind] = replaced_test(trainer, own)
    minutes_used = (trainer.seconds + prepared.writing) / 60
    lines = [
        [kind, *(f"{share:.2f}" for share in places), f"{tokens_a_round(places):.2f}"] for kind, places in rows.items()
    ]
    heads = ["prompts", *(f"correct at position {place}" for place in range(1, PLACES + 1)), "tokens per round"]
    spent = f"{minutes_used:.0f} minutes, {prepared.writing / 60:.0f} of them for generating the answers"
    about = f"Trained on {trainer.seen:,} tokens, counting repeats, in {spent}."
    return Found({f"draft_head_{Path(model).name}": f"{table(heads, lines)}\n{about}\n"}, rows)


def replaced_test(trainer, answers):
    """Return the test of a trainer on other answers."""
    own, trainer.held = trainer.held, answers
    try:
        return trainer.test()
    finally:
        trainer.held = own


@study("docs/heads.md", "README.md", minutes=10)
def draft_head_speed(
    head: Path = Path("draft-head-smollm2"),
    model: str = "smollm2",
    gears: list[str] = ["4,16", "8", "4"],  # noqa: B006
    prompts: int = 8,
    max_tokens: int = 120,
) -> Found:
    """Measure the speedup of a draft head over plain decoding, by weights and kind of prompt.

    Plain decoding, mode lossless without a head, and with it alternate in one process. Both have prompt lookup in the
    prompt and the output.

    Args:
        head: Directory of a head.
        model: Name as of `real-models`.
        gears: Bits of the weights; `file` for those of the GGUF file.
        prompts: Number of prompts of each kind: chat, code, math, and edits that copy their source.
        max_tokens: Maximum number of tokens in an output.
    """
    rows, short, data = [], [], list[dict[str, Any]]()
    mode = Lossless(share_lookup=False)
    title, file_type = TITLES[named(model)]
    for each in gears:
        gearbox, tokenizer = loaded(model, each)
        way = partial(written, gearbox, tokenizer, tokens=max_tokens)
        ways = {
            "plain": partial(way, mode=Static()),
            "without": partial(way, mode=mode),
            "with": partial(way, mode=mode, draft_model=read_head(head, gearbox.model)),
        }
        weights, medians = file_type if each == "file" else f"{each.rpartition(',')[2]} bits", []
        for kind, texts in prompts_by_kind(prompts).items():
            asked = [list(encode(tokenizer, text)) for text in texts]
            speedup, _, same = compared(ways, asked, max_tokens // 4, kind)
            rows.append([weights, kind, *map(spread, speedup.values()), f"{same} of {len(asked)}"])
            medians.append(f"{statistics.median(speedup['with']):.2f}")
            data.append({"gears": each, "kind": kind, "speedup": speedup, "identical": same})
        short.append([title, weights, *medians])
    columns = ["weights", "prompts", "speedup, lossless without a head", "with the head"]
    about = f"{prompts} prompts of each kind, up to {max_tokens} tokens; median (range)"
    text = f"{table_here([*columns, 'outputs identical to plain decoding'], rows)}\n{about}\n"
    of_heads = table(["model", "weights", *prompts_by_kind(0)], short)
    return Found({f"draft_head_speed_{named(model)}": text, "draft_heads": of_heads}, data)
