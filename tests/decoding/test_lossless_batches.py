"""Mode lossless in batches: the top gear writes each text, as it writes it alone."""

import mlx.core as mx
import pytest
from conftest import tiny_model
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from schemas import CHOICE, PERSON, PROMPT, format_of

from gearbx_mlx import Gearbox, Lossless, Static, batch_generate, stream_generate
from gearbx_mlx.decoding.stream import batch_generator
from gearbx_mlx.serving.grammar import constraint_for

PROMPTS = [
    "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:",
    "Once upon a time there was a king who",
    "The",
    "Question: Mia reads 20 pages a day. How many pages does she read in a week?\nAnswer:",
]


def alone(gearbox, tokenizer, prompt, max_tokens=24, seed=None, mode="static", **keywords):
    if seed is not None:
        mx.random.seed(seed)
    run = stream_generate(gearbox.model, tokenizer, prompt, max_tokens, mode=mode, gearbox=gearbox, **keywords)
    return [response.token for response in run]


def together(gearbox, tokenizer, prompts=PROMPTS, max_tokens=24, **keywords):
    return batch_generate(
        gearbox.model, tokenizer, prompts, max_tokens=max_tokens, mode="lossless", gearbox=gearbox, **keywords
    )


def tokens_of(done):
    return [[response.token for response in trace] for trace in done.traces]


def test_texts_are_those_of_the_mode_alone_and_nothing_drafts(demo, geared_demo):
    expected = [alone(geared_demo, demo.tokenizer, prompt, mode=Lossless(draft_length=3)) for prompt in PROMPTS]
    done = together(geared_demo, demo.tokenizer)
    assert tokens_of(done) == expected
    first = done.traces[0][1]
    assert (first.gear, first.drafted, first.passes, first.together) == ("high", 0, (0, 1), 4)


def test_no_policy_takes_a_text_from_the_top_gear(demo, geared_demo):
    done = together(geared_demo, demo.tokenizer, PROMPTS[:2], 6, batch_policy=min)
    assert {response.gear for trace in done.traces for response in trace} == {"high"}


def test_sampled_ones_are_those_of_their_seeds(demo, geared_demo):
    samplers, seeds = [make_sampler(0.8), None, make_sampler(0.8, xtc_probability=0.5)], [3, None, 7]
    expected = [
        alone(geared_demo, demo.tokenizer, prompt, 24, seed, sampler=sampler)
        for prompt, sampler, seed in zip(PROMPTS, samplers, seeds)
    ]
    assert tokens_of(together(geared_demo, demo.tokenizer, PROMPTS[:3], samplers=samplers, seeds=seeds)) == expected


def test_with_logits_processors_of_their_own(demo, geared_demo):
    processors = [make_logits_processors(repetition_penalty=1.3), None, make_logits_processors({5: 4.0}), None]
    expected = [
        alone(geared_demo, demo.tokenizer, prompt, logits_processors=own) for prompt, own in zip(PROMPTS, processors)
    ]
    assert tokens_of(together(geared_demo, demo.tokenizer, logits_processors=processors)) == expected


def test_answers_in_company_fit_their_schemas(demo, geared_demo):
    def constraints():
        return [constraint_for(demo.tokenizer, format_of(schema)) for schema in (CHOICE, PERSON)]

    expected = [alone(geared_demo, demo.tokenizer, PROMPT, 90, logits_processors=[one]) for one in constraints()]
    own = constraints()
    done = together(geared_demo, demo.tokenizer, [PROMPT, PROMPT], 90, logits_processors=[[one] for one in own])
    assert [constraint.error for constraint in own] == [None, None]
    assert tokens_of(done) == expected


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mamba2", "gemma3_text"])
def test_of_other_architectures(architecture, demo):
    gearbox = Gearbox(tiny_model(architecture), "6,16")
    prompts = [[1, 5, 9, 2, 7], [3, 1], [8, 8, 8, 2]]
    expected = [alone(gearbox, demo.tokenizer, prompt, 12) for prompt in prompts]
    assert tokens_of(together(gearbox, demo.tokenizer, prompts, 12)) == expected


@pytest.mark.parametrize("mode", [Lossless(), Static()])
def test_a_processor_that_fails_ends_its_own_text(mode, demo, geared_demo):
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
