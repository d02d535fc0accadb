"""Training of a draft head: share of correct drafts by kind of prompt."""

from pathlib import Path

from pages import table

from gearbx_mlx.cli.flags import ModelSettings
from gearbx_mlx.draft_head import DraftHeadSettings, PromptTextSettings, TrainingSettings
from gearbx_mlx.draft_head.answers import MAX_HELD_OUT
from gearbx_mlx.draft_head.layer import PLACES
from gearbx_mlx.draft_head.prompts import sources
from gearbx_mlx.draft_head.run import prepare, trained
from gearbx_mlx.draft_head.training import tokens_a_round

from .studies import Found, study


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
    about = f"{trainer.seen:,} tokens seen in {minutes_used:.0f} minutes."
    return Found({f"draft_head_{Path(model).name}": f"{table(heads, lines)}\n\n{about}"}, rows)


def replaced_test(trainer, answers):
    """Return the test of a trainer on other answers."""
    own, trainer.held = trainer.held, answers
    try:
        return trainer.test()
    finally:
        trainer.held = own
