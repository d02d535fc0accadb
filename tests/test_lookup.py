"""Prompt lookup in lossless mode: the text itself proposes what follows, and the text is the top gear's."""

import itertools
import json
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from conftest import ARCHITECTURES, tiny_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from test_lossless import QUESTION, SAMPLERS, assert_same, both, told

from gearbx_mlx import Gearbox, GearbxError, Lossless, stream_generate
from gearbx_mlx.decoding.draft_plans import DraftPlan
from gearbx_mlx.decoding.lossless import LosslessModel
from gearbx_mlx.routing.acceptance import FixedLength
from gearbx_mlx.routing.rounds import TRIAL, CostRule, Costs, OneStretch, Rounds, Stretches

TWICE = f"{QUESTION} 5 + 7 = 12.\n{QUESTION} 5 + 7"  # which the second answer repeats


def certain_lookups(most=15):
    """Rounds that take every proposal from the text, and never draft without one."""
    rounds = Rounds(Costs(lambda: 100.0, lambda rows: 1.0), most)
    for run in range(2, 9):
        for _ in range(50):
            rounds.agreement.add(run, True)
    return rounds


class TestLookup:
    """The text itself proposes what follows."""

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_bit_for_bit_on_every_architecture(self, architecture):
        model = tiny_model(architecture)
        prompt = mx.array([1, 5, 9, 2, 7, 1, 5, 9, 2, 7, 1, 5])
        proposed = 0

        def counted(logprobs):
            nonlocal proposed
            proposed += lossless.step.looked_up
            return mx.argmax(logprobs, axis=-1)

        gearbox = Gearbox(model, "6,16", kernels="native")
        theirs = list(generate_step(prompt, model, max_tokens=40))
        lossless = LosslessModel(gearbox, plan=DraftPlan(FixedLength(4), certain_lookups()), prompt_tokens=12)
        ours = list(generate_step(prompt, lossless, max_tokens=40, sampler=counted))
        for (mine, logprobs), (token, expected) in zip(ours, theirs, strict=True):
            assert mine == token
            assert np.array_equal(np.array(logprobs), np.array(expected))
        assert proposed > 0

    @pytest.mark.some(2)
    @pytest.mark.parametrize("sampler", ["greedy", "temperature", "top-p"])
    def test_with_the_same_seed_it_draws_the_same_tokens(self, geared_demo, demo, sampler):
        (theirs, after), (ours, after_ours) = both(
            geared_demo, demo.tokenizer, TWICE, max_tokens=50, sampler=SAMPLERS[sampler], lookup_tokens=15
        )
        assert_same(told(ours), told(theirs))
        assert after == after_ours
        assert any(r.source == "lookup" for r in ours)

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        "keywords",
        [
            {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
            {"kv_bits": 4, "quantized_kv_start": 45, "kv_group_size": 32},
            {"prefill_step_size": 4},
            {"max_tokens": 2},
        ],
    )
    def test_with_keywords_of_mlx_lm(self, geared_demo, demo, keywords):
        (theirs, after), (ours, after_ours) = both(geared_demo, demo.tokenizer, TWICE, **{"max_tokens": 40} | keywords)
        assert_same(told(ours), told(theirs))
        assert after == after_ours

    def test_every_token_has_one_source_and_what_is_looked_up_reads_no_weights(self, geared_demo, demo):
        mode = Lossless()
        run = list(stream_generate(demo.model, demo.tokenizer, TWICE, 40, gearbox=geared_demo, mode=mode))
        low, high = (geared_demo.weight_bytes_per_token(gear) for gear in geared_demo.ladder)
        sources = Counter(r.source for r in run)
        assert sources["model"] == sum(r.passes[1] for r in run)
        assert 0 < sources["lookup"] <= sum(r.looked_up for r in run)
        assert all(r.passes[0] == r.drafted for r in run)
        assert all(not (r.drafted and r.looked_up) for r in run)
        for r in run:
            if r.passes[1]:
                row = geared_demo.weight_bytes_per_token(geared_demo.ladder.top, 1 + r.drafted + r.looked_up) - high
                assert r.weight_bytes == r.passes[0] * low + high + row
            assert r.from_draft == (r.source == "draft")
            assert r.gear == ("low" if r.from_draft else "high")

    def test_the_same_text_has_the_same_passes_where_nothing_is_measured(self, geared_demo, demo):
        runs = [
            [
                (r.token, r.passes, r.source)
                for r in stream_generate(demo.model, demo.tokenizer, TWICE, 30, gearbox=geared_demo, mode=Lossless())
            ]
            for _ in range(2)
        ]
        assert runs[0] == runs[1]

    def test_can_be_turned_off_and_bounded(self, geared_demo, demo):
        for most in (0, 3):
            mode = Lossless(lookup_tokens=most)
            run = list(stream_generate(demo.model, demo.tokenizer, TWICE, 30, gearbox=geared_demo, mode=mode))
            assert max(r.looked_up for r in run) == most

    @pytest.mark.parametrize(
        ("setting", "says"),
        [
            ({"draft_length": 4, "rule": FixedLength(3)}, "draft_length and rule exclude each other"),
            ({"lookup_tokens": 16}, "lookup_tokens is 16; give 0 to 15"),
            ({"lookup_tokens": True}, "lookup_tokens is True; give 0 to 15"),
            ({"lookup_tokens": 3.0}, "lookup_tokens is 3.0; give 0 to 15"),
            ({"lookup_tokens": "3"}, "lookup_tokens is '3'; give 0 to 15"),
        ],
    )
    def test_refuses_what_does_not_exist(self, setting, says):
        with pytest.raises(GearbxError, match=says):
            Lossless(**setting)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "drafts save time; lookup proposes up to 15 tokens at once"),
        (("--draft-length", 4), "lossless: drafts of 4 tokens; lookup proposes nothing"),
        (("--draft-length", 1), "lossless: drafts of 1 token; lookup proposes nothing"),
    ],
)
def test_verbose_says_how_tokens_are_proposed(command, flags, says):
    done = command("generate", "-m", 2, "--mode", "lossless", "--verbose", "all", *flags)
    assert done.status == 0
    assert says in done.err.replace("\n", " ")


@pytest.mark.slow
def test_flags_and_summary_count_what_was_looked_up(command, tmp_path):
    summary, trace = tmp_path / "s.json", tmp_path / "t.jsonl"
    flags = ("--mode", "lossless", "--ignore-chat-template", "-m", 30, "--prompt", TWICE)
    done = command("generate", *flags, "--summary", summary, "--trace", trace)
    assert done.status == 0
    counted = json.loads(summary.read_text())
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    sources = Counter(row["source"] for row in rows)
    assert counted["looked_up"] == sum(row["looked_up"] for row in rows)
    assert counted["lookup_accepted"] == sources["lookup"] > 0
    assert counted["accepted"] == sources["draft"]
    assert counted["verifications"] + counted["accepted"] + counted["lookup_accepted"] == counted["tokens"]
    assert f"{counted['looked_up']}, {counted['lookup_accepted']} accepted" in done.err


def test_the_flag_is_of_mode_lossless(command):
    done = command("generate", "-m", 2, "--mode", "static", "--draft-length", 3)
    assert done.status == 2
    assert "--draft-length is for --mode lossless" in done.err.replace("\n", " ")


def test_where_drafts_lose_the_top_gear_goes_on_alone(geared_demo, demo):
    """Costs of a machine on which a draft takes as long as the top gear: the top gear writes nearly all tokens."""
    rounds = Rounds(Costs(lambda: 1.5, lambda rows: 1.0 + 0.2 * (rows - 1), measured=True), 0)
    rule = CostRule(lambda entropy: 0.9, rounds.costs)
    lossless = LosslessModel(geared_demo, plan=DraftPlan(rule, rounds), prompt_tokens=1)
    drafted = 0

    def sampler(logprobs):
        nonlocal drafted
        drafted += lossless.step.drafted
        return mx.argmax(logprobs, axis=-1)

    tokens = [token for token, _ in generate_step(mx.array([1]), lossless, max_tokens=90, sampler=sampler)]
    assert len(tokens) == 90
    assert 0 < drafted <= 12


@pytest.mark.parametrize("sampler", ["greedy", "top-p"])
def test_the_text_is_the_same_whichever_way_is_faster(geared_demo, demo, sampler):
    """A clock that makes both ways alternate: stretches in rounds and of the top gear alone follow each other."""
    runs = []
    clock = itertools.count()
    for stretches in (None, Stretches(clock.__next__)):
        geared_demo.shift("high")
        rounds = Rounds(Costs(lambda: 0.1, lambda rows: 1.0))
        prompt = mx.array(demo.tokenizer.encode(TWICE))
        plan = DraftPlan(FixedLength(4), rounds, stretches or OneStretch())
        lossless = LosslessModel(geared_demo, plan=plan, prompt_tokens=len(prompt))
        alone = []

        def noted(logprobs, plan=plan, alone=alone):
            alone.append(not plan.stretches.in_rounds)
            return (SAMPLERS[sampler] or (lambda values: mx.argmax(values, axis=-1)))(logprobs)

        mx.random.seed(4)
        model = geared_demo.model if stretches is None else lossless
        tokens = [(token, np.array(p)) for token, p in generate_step(prompt, model, max_tokens=90, sampler=noted)]
        runs.append(tokens)
    assert [token for token, _ in runs[0]] == [token for token, _ in runs[1]]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(*runs))
    assert 8 <= sum(alone) < 80
    begun = sum(before and not now for before, now in itertools.pairwise(alone))
    assert next(clock) == len(alone) + begun  # of every token, and where rounds have waited for the token before


def test_the_time_between_texts_does_not_count_where_a_prompt_has_one_token(tiny):
    """Texts of one token say nothing about either way: the time of that token is unknown."""
    gearbox, now = Gearbox(tiny, "4,16"), [0.0]
    stretches = Stretches(lambda: now[0])
    for _ in range(3 * TRIAL[True]):
        plan = DraftPlan(FixedLength(1), Rounds(Costs(lambda: 0.1, lambda rows: 1.0), 0), stretches)
        lossless = LosslessModel(gearbox, plan=plan, prompt_tokens=1, max_tokens=1)
        lossless(mx.array([[1]]), cache=make_prompt_cache(tiny))
        assert stretches.in_rounds
        assert not stretches.over
        now[0] += 100.0
