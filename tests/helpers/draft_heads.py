"""Draft heads in training for tiny models, on random answers."""

import numpy as np

from gearbx_mlx.draft_head.answers import Answer
from gearbx_mlx.draft_head.layer import HeadShape
from gearbx_mlx.draft_head.target import HeadTarget
from gearbx_mlx.draft_head.training import Trainer, frequent_tokens

ROWS = 24


def random_answers(count: int, vocabulary: int, seed: int = 0) -> list[Answer]:
    """Answers that count up from a random token, so that there is something to learn."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        length = int(random.integers(16, 40))
        tokens = (random.integers(vocabulary) + np.arange(length)) % vocabulary
        found.append(Answer(number, tokens.tolist(), 4, number / 10))
    return found


def trainer_of(model) -> Trainer:
    """A trainer of a small head of a tiny model."""
    args, answers = model.args, random_answers(40, model.args.vocab_size)
    size, heads = args.hidden_size, args.num_attention_heads
    shape = HeadShape(size, 48, heads, args.num_key_value_heads, size // heads, args.vocab_size, ROWS, 1e-5, 10000.0)
    tokens = frequent_tokens(answers, ROWS, args.vocab_size)
    return Trainer(HeadTarget(model, "tiny"), shape, tokens, answers[4:], answers[:4])
