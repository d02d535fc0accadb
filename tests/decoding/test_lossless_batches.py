"""Mode lossless in batches: the top gear writes each text, as it writes it alone."""

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from gearbx_mlx import Lossless, batch_generate, stream_generate

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


def test_outputs_equal_single_runs_without_drafts(demo, geared_demo):
    expected = [alone(geared_demo, demo.tokenizer, prompt, mode=Lossless(draft_length=3)) for prompt in PROMPTS]
    done = together(geared_demo, demo.tokenizer)
    assert tokens_of(done) == expected
    first = done.traces[0][1]
    assert (first.gear, first.drafted, first.passes, first.batch_size) == ("high", 0, (0, 1), 4)


def test_policies_keep_sequences_in_top_gear(demo, geared_demo):
    done = together(geared_demo, demo.tokenizer, PROMPTS[:2], 6, batch_policy=min)
    assert {response.gear for trace in done.traces for response in trace} == {"high"}


def test_sampled_outputs_match_their_seeds(demo, geared_demo):
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
