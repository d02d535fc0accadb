"""Texts that are written side by side, each in its own gears: the texts that each would be alone."""

import pytest

from gearbx_mlx import Gearbox, Kickdown, Route, Static, load, stream_generate
from gearbx_mlx.kernels import cpu
from research.evaluation.together import Climbing, Shifting, read_prompt, write_together

pytestmark = pytest.mark.slow
PROMPTS = ["Tom has 5 apples. How many", "Tom has 5 apples and a king who", "Tom has 5 apples. The wolf"]
SHARED = 5  # tokens that all prompts begin with
THRESHOLDS = (2.0, 3.0)
TOKENS = 24


@pytest.fixture(scope="module")
def loaded():
    """A gearbox, the tokenizer and the prompts."""
    if cpu.why_not() is not None:
        pytest.skip(cpu.why_not())
    model, tokenizer = load()
    return Gearbox(model, "4,8,16", kernels="native"), tokenizer, [tokenizer.encode(prompt) for prompt in PROMPTS]


def alone(gearbox, tokenizer, prompt, mode):
    """Return tokens and passes of a text."""
    responses = list(stream_generate(gearbox.model, tokenizer, prompt, TOKENS, mode=mode, gearbox=gearbox))
    return [each.token for each in responses], [sum(column) for column in zip(*(each.passes for each in responses))]


def together(gearbox, prompts, reads, choosers):
    assert len({tuple(prompt[:SHARED]) for prompt in prompts}) == 1
    begun = {gear: read_prompt(gearbox, prompts[0][:SHARED], gear) for gear in reads}
    caches = [read_prompt(gearbox, prompt[SHARED:-1], gear, begun[gear]) for prompt, gear in zip(prompts, reads)]
    return write_together(gearbox, prompts, caches, choosers, TOKENS, ())


@pytest.mark.parametrize("mode", [Static("low", prompt_gear="same"), Route(thresholds=THRESHOLDS)])
def test_outputs_of_gates(loaded, mode):
    gearbox, tokenizer, prompts = loaded
    states = [mode.sequence(gearbox, tokenizer, prompt) for prompt in prompts]
    choosers = [Shifting(gearbox, state) for state in states]
    texts = together(gearbox, prompts, [state.prompt_gear for state in states], choosers)
    for prompt, text in zip(prompts, texts):
        assert (text.tokens, text.passes) == alone(gearbox, tokenizer, prompt, mode)
        assert all(len(bits) == 1 for bits in text.entropies)


def test_outputs_with_climbs(loaded):
    gearbox, tokenizer, prompts = loaded
    choosers = [Climbing(gearbox, THRESHOLDS) for _ in prompts]
    texts = together(gearbox, prompts, [gearbox.ladder.top] * len(prompts), choosers)
    for prompt, text in zip(prompts, texts):
        assert (text.tokens, text.passes) == alone(gearbox, tokenizer, prompt, Kickdown(THRESHOLDS, prompt_gear="high"))
        assert sum(map(len, text.entropies)) == sum(text.passes)
    assert all(sum(text.passes[1] for text in texts) for text in texts)  # or no text climbed
