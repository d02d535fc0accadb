"""Texts of lossless mode, and of mlx-lm in the top gear alone, to be compared bit for bit."""

import copy
import functools

import mlx.core as mx
import numpy as np
from conftest import mlx_lm_loop

from gearbx_mlx import load, stream_generate

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:"
TWICE = f"{QUESTION} 5 + 7 = 12.\n{QUESTION} 5 + 7"  # which the second answer repeats


@functools.cache
def endless():
    """The demo model's tokenizer, without tokens that end a text."""
    tokenizer = copy.copy(load()[1])
    tokenizer.eos_token_ids = set()
    return tokenizer


def written(gearbox, prompt, max_tokens=24, mode=None, seed=5, **keywords):
    """Tokens and log-probabilities of lossless mode, or of mlx-lm's loop, and the random state afterwards.

    No token ends a text.
    """
    tokenizer = endless()
    gearbox.shift("high")
    mx.random.seed(seed)
    if mode is None:
        run = mlx_lm_loop(gearbox)(gearbox.model, tokenizer, prompt, max_tokens, **keywords)
    else:
        run = stream_generate(gearbox.model, tokenizer, prompt, max_tokens, gearbox=gearbox, mode=mode, **keywords)
    return [(r.token, np.array(r.logprobs)) for r in run], mx.random.state[0].tolist()


def assert_written(ours, theirs):
    """Tokens are the same, log-probabilities bit for bit, and the next random numbers too."""
    assert [token for token, _ in ours[0]] == [token for token, _ in theirs[0]]
    assert all(np.array_equal(mine, other) for (_, mine), (_, other) in zip(ours[0], theirs[0], strict=True))
    assert ours[1] == theirs[1]
