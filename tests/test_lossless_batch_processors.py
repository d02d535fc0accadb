"""Logits processors in batches of mode lossless: they see only the text, and if one fails, only its text ends."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler
from test_lossless_batches import PROMPTS, alone, together, tokens_of
from test_serving_structured import CHOICE, PERSON, PROMPT, format_of

from gearbx_mlx import GearbxWarning, Lossless, Static, batch_generator
from gearbx_mlx.decoding import drafting
from gearbx_mlx.serving.grammar import constraint_for

REPEATS = PROMPTS[0] + " 12\n" + PROMPTS[0]
MODES = [Lossless(cost="bytes"), Lossless(draft_length=6), Lossless(cost="bytes", lookup_tokens=15)]


@pytest.fixture(params=[0, 300], ids=["padded with the end token", "padded with another one"])
def padding(request, monkeypatch):
    monkeypatch.setattr(drafting, "PADDING", request.param)


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_in_company_fits_its_schema(mode, demo, geared_demo, padding):
    constraints = [constraint_for(demo.tokenizer, format_of(schema)) for schema in (CHOICE, PERSON)]
    expected = [
        alone(geared_demo, demo.tokenizer, PROMPT, 90, logits_processors=[constraint_for(demo.tokenizer, format_of(s))])
        for s in (CHOICE, PERSON)
    ]
    own = [*([constraint] for constraint in constraints), [], []]
    prompts = [PROMPT, PROMPT, REPEATS, "a b c d e f g h i j " * 12]
    done = together(geared_demo, demo.tokenizer, prompts, 90, mode, logits_processors=own)
    assert [constraint.error for constraint in constraints] == [None, None]
    assert tokens_of(done)[:2] == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_processor_sees_nothing_behind_the_end_of_its_text(mode, demo, geared_demo, texts_end, padding):
    stop, seen = texts_end, set()

    def look(tokens, logits):
        seen.update(tokens.tolist()[count:-1])  # mlx-lm asks for one token more, after the end
        return logits

    count = len(demo.tokenizer.encode(PROMPTS[0]))
    together(
        geared_demo,
        demo.tokenizer,
        [PROMPTS[0], REPEATS],
        mode=mode,
        logits_processors=[[look], []],
        stop_tokens=[[stop]],
    )
    assert seen
    assert not seen & {stop, 300}


@pytest.fixture
def texts_end(demo, geared_demo):
    """A token within the first text, as the end-of-text token."""
    return alone(geared_demo, demo.tokenizer, PROMPTS[0])[6]


@pytest.mark.parametrize("mode", [Lossless(draft_length=4), Static()])
def test_one_that_fails_ends_its_own_text(mode, demo, geared_demo):
    prompts = [demo.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]

    def fails(tokens, logits):
        if len(tokens) >= len(prompts[0]) + 3:
            raise ValueError("three are enough")
        return logits

    generator = batch_generator(geared_demo.model, demo.tokenizer, mode=mode, gearbox=geared_demo)
    first, second = generator.insert(prompts, [12, 12], logits_processors=[[fails], []])
    given = [response for step in iter(generator.next_generated, []) for response in step]
    generator.close()
    errors = [response.error for response in given if response.uid == first]
    assert errors[:-1] == [None] * 3
    assert "three are enough" in str(errors[-1])
    other = [response.token for response in given if response.uid == second]
    assert other == alone(geared_demo, demo.tokenizer, PROMPTS[1], 12)


@pytest.mark.parametrize("stop", [[[4000]], [[0]]])
def test_nothing_follows_logits_that_are_no_numbers(stop, demo, geared_demo):
    prompts = [demo.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    broken = len(prompts[0]) + 3

    def once(tokens, logits):
        return logits * mx.nan if len(tokens) == broken else logits

    mode = Lossless(draft_length=4)
    generator = batch_generator(geared_demo.model, demo.tokenizer, mode=mode, gearbox=geared_demo, stop_tokens=stop)
    first, _ = generator.insert(prompts, [12, 12], logits_processors=[[once], []])
    given = [response for step in iter(generator.next_generated, []) for response in step]
    generator.close()
    assert [response.error is None for response in given if response.uid == first] == [True] * 3 + [False]


def test_a_draft_that_fails_ends_drafts_of_the_texts_of_then_alone(demo, geared_demo):
    prompts = [demo.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    calls = []

    def fails_in_the_first_draft(logprobs):
        calls.append(1)
        if len(calls) == 2:  # the first one belongs to the prompt
            raise ValueError("odd")
        return greedy_sampler(logprobs)

    mode = Lossless(draft_length=4)
    generator = batch_generator(geared_demo.model, demo.tokenizer, mode=mode, gearbox=geared_demo)

    def written(samplers):
        uid, _ = generator.insert(prompts, [12, 12], samplers=samplers)
        given = [response for step in iter(generator.next_generated, []) for response in step]
        return [r.token for r in given if r.uid == uid], sum(r.drafted for r in given)

    with pytest.warns(GearbxWarning, match="cannot draft in this batch .*odd"):
        first, drafted = written([fails_in_the_first_draft, None])
    second, drafted_later = written(None)
    generator.close()
    assert first == second == alone(geared_demo, demo.tokenizer, PROMPTS[0], 12)
    assert drafted == 0 < drafted_later
