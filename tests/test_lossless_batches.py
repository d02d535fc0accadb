"""Mode lossless in batches: each text is the same as the top gear writes alone."""

import mlx.core as mx
import pytest
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxWarning, Lossless, batch_generate, stream_generate
from gearbx_mlx.decoding.stream import batch_generator
from gearbx_mlx.routing.rounds import CostRule, Costs

PROMPTS = [
    "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:",
    "Once upon a time there was a king who",
    "The",
    "Question: Mia reads 20 pages a day. How many pages does she read in a week?\nAnswer:",
]
REPEATED = "a b c d e f g h i j " * 24


@pytest.fixture(scope="module")
def texts(demo, geared_demo):
    """The text of the top gear alone after every prompt: greedy, 40 tokens."""
    return [alone(geared_demo, demo.tokenizer, prompt) for prompt in PROMPTS]


def alone(gearbox, tokenizer, prompt, max_tokens=40, seed=None, **keywords):
    if seed is not None:
        mx.random.seed(seed)
    run = stream_generate(gearbox.model, tokenizer, prompt, max_tokens, mode="static", gearbox=gearbox, **keywords)
    return [response.token for response in run]


def together(gearbox, tokenizer, prompts=PROMPTS, max_tokens=40, mode=None, **keywords):
    mode = mode or Lossless(cost="bytes")
    return batch_generate(
        gearbox.model, tokenizer, prompts, max_tokens=max_tokens, mode=mode, gearbox=gearbox, **keywords
    )


def tokens_of(done):
    return [[response.token for response in trace] for trace in done.traces]


class TestTexts:
    @pytest.mark.some(1)
    @pytest.mark.parametrize("length", [1, 4, 15])
    def test_are_those_of_the_top_gear_alone(self, demo, geared_demo, texts, length):
        done = together(geared_demo, demo.tokenizer, mode=Lossless(draft_length=length))
        assert tokens_of(done) == texts

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_in_batches_of_few(self, demo, geared_demo, texts, count):
        assert tokens_of(together(geared_demo, demo.tokenizer, PROMPTS[:count])) == texts[:count]

    def test_of_equal_prompts(self, demo, geared_demo, texts):
        assert tokens_of(together(geared_demo, demo.tokenizer, PROMPTS[:1] * 3)) == texts[:1] * 3

    def test_sampled_ones_are_those_of_their_seeds(self, demo, geared_demo):
        samplers = [
            make_sampler(0.8),
            None,
            gearbx_mlx.make_sampler(1.0, top_k=20),
            make_sampler(0.8, xtc_probability=0.5),
        ]
        seeds = [3, None, 5, 7]
        expected = [
            alone(geared_demo, demo.tokenizer, prompt, 24, seed, sampler=sampler)
            for prompt, sampler, seed in zip(PROMPTS, samplers, seeds)
        ]
        done = together(
            geared_demo, demo.tokenizer, max_tokens=24, samplers=samplers, seeds=seeds, mode=Lossless(draft_length=3)
        )
        assert tokens_of(done) == expected
        assert any(response.from_draft for response in done.traces[0])

    def test_with_logits_processors_of_their_own(self, demo, geared_demo):
        processors = [make_logits_processors(repetition_penalty=1.3), None, make_logits_processors({5: 4.0}), None]
        expected = [
            alone(geared_demo, demo.tokenizer, prompt, 24, logits_processors=own)
            for prompt, own in zip(PROMPTS, processors)
        ]
        done = together(geared_demo, demo.tokenizer, max_tokens=24, logits_processors=processors)
        assert tokens_of(done) == expected

    @pytest.mark.parametrize("most", [[1, 1, 1, 1], [1, 2, 9, 5], [7, 1, 3, 8]])
    def test_end_within_drafts(self, demo, geared_demo, texts, most):
        done = together(geared_demo, demo.tokenizer, max_tokens=most, mode=Lossless(draft_length=6))
        assert tokens_of(done) == [text[:count] for text, count in zip(texts, most)]
        assert [trace[-1].finish_reason for trace in done.traces] == ["length"] * 4

    def test_end_at_stop_tokens_within_drafts(self, demo, geared_demo, texts):
        stop = texts[0][6]
        ends = [text.index(stop) + 1 if stop in text else len(text) for text in texts]
        done = together(geared_demo, demo.tokenizer, mode=Lossless(draft_length=15), stop_tokens=[[stop]])
        assert tokens_of(done) == [text[:end] for text, end in zip(texts, ends)]

    @pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "gpt_neox"])
    def test_of_other_architectures(self, architecture, demo):
        gearbox = Gearbox(tiny_model(architecture), "6,16")
        prompts = [[1, 5, 9, 2, 7], [3, 1], [8, 8, 8, 2]]
        expected = [alone(gearbox, demo.tokenizer, prompt, 12) for prompt in prompts]
        done = together(gearbox, demo.tokenizer, prompts, 12, Lossless(draft_length=3))
        assert tokens_of(done) == expected

    @pytest.mark.parametrize(("gears", "least", "most"), [("2,16", 0.0, 0.7), ("8,16", 0.7, 1.0)])
    def test_with_drafts_often_wrong_or_mostly_right(self, gears, least, most, fresh_demo, texts):
        gearbox = Gearbox(fresh_demo.model, gears, kernels="auto")
        done = together(gearbox, fresh_demo.tokenizer, mode=Lossless(draft_length=3))
        assert tokens_of(done) == texts
        share = sum(r.from_draft for trace in done.traces for r in trace) / sum(map(len, texts))
        assert least <= share <= most


class TestKeyValueCaches:
    def test_are_those_of_the_texts(self, demo, geared_demo):
        """A cache that a batch gives back continues like the text's own: no rejected draft is left in it."""
        whole = [alone(geared_demo, demo.tokenizer, prompt, 20) for prompt in PROMPTS[:3]]
        done = together(
            geared_demo,
            demo.tokenizer,
            PROMPTS[:3],
            [3, 9, 6],
            Lossless(draft_length=5),
            return_prompt_caches=True,
        )
        for text, trace, cache in zip(whole, done.traces, done.caches):
            count = len(trace)
            going_on = stream_generate(
                geared_demo.model,
                demo.tokenizer,
                mx.array(text[count : count + 1]),
                20 - count - 1,
                mode="static",
                gearbox=geared_demo,
                prompt_cache=cache,
            )
            assert text[: count + 1] + [response.token for response in going_on] == text

    @pytest.mark.parametrize("architecture", ["mamba2", "gemma3_text"])
    def test_that_cannot_be_cut_go_on_without_drafts(self, architecture, demo):
        gearbox = Gearbox(tiny_model(architecture), "6,16")
        prompts = [[1, 5, 9, 2, 7], [3, 1]]
        expected = [alone(gearbox, demo.tokenizer, prompt, 8) for prompt in prompts]
        with pytest.warns(GearbxWarning, match="cannot draft in this batch .* goes on alone, with the same texts"):
            done = together(gearbox, demo.tokenizer, prompts, 8, Lossless(draft_length=3))
        assert tokens_of(done) == expected
        assert not any(response.drafted for trace in done.traces for response in trace)


class TestTrace:
    def test_says_what_was_drafted_and_read(self, demo, geared_demo):
        done = together(geared_demo, demo.tokenizer, mode=Lossless(draft_length=3))
        trace = done.traces[0]
        low, top = geared_demo.ladder[0], geared_demo.ladder.top
        first = next(response for response in trace if response.drafted)
        of_round = 3 * geared_demo.weight_bytes_per_token(low, 4) + geared_demo.weight_bytes_per_token(top, 16)
        assert (first.drafted, first.passes, first.weight_bytes) == (3, (3, 1), of_round // 4)
        accepted = [response for response in trace if response.from_draft]
        assert {(response.gear, response.source) for response in accepted} == {(low.name, "draft")}
        assert 0 < len(accepted) <= sum(response.drafted for response in trace)
        assert [trace[1].together for trace in done.traces] == [4] * 4

    def test_has_the_top_gears_distributions(self, demo, geared_demo):
        run = stream_generate(geared_demo.model, demo.tokenizer, PROMPTS[0], 12, mode="static", gearbox=geared_demo)
        expected = [response.entropy for response in run]
        done = together(geared_demo, demo.tokenizer, max_tokens=12, mode=Lossless(draft_length=4))
        assert [response.entropy for response in done.traces[0]] == pytest.approx(expected, abs=1e-3)


class TestCompany:
    @settings(max_examples=12)
    @given(data=st.data())
    def test_changes_no_text(self, demo, geared_demo, texts, data):
        """Sequences join and leave at any step, with any drafts."""
        length = data.draw(st.integers(1, 6))
        generator = batch_generator(
            geared_demo.model, demo.tokenizer, mode=Lossless(draft_length=length), gearbox=geared_demo
        )
        waiting = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        written: dict[int, list[int]] = {}
        wanted: dict[int, list[int]] = {}
        while waiting or len(generator.sequences):
            if waiting and (not generator.sequences or data.draw(st.booleans())):
                which, most = waiting.pop(), data.draw(st.integers(1, 12))
                (uid,) = generator.insert([demo.tokenizer.encode(PROMPTS[which])], [most])
                written[uid], wanted[uid] = [], texts[which][:most]
            for response in generator.next_generated():
                written[response.uid].append(response.token)
            if generator.sequences and data.draw(st.integers(0, 9)) == 0:
                left = next(iter(generator.sequences))
                generator.remove([left])
                wanted[left] = wanted[left][: len(written[left])]
        generator.close()
        assert written == wanted


class TestCosts:
    def test_drafts_end_where_a_batch_pays_too_much(self):
        """If rows cost as much as passes, drafts of many sequences end at once; those of one continue."""
        lengths = []
        for rows, of_row in ((1, 0.0), (16, 1.0)):
            costs = Costs(lambda: 0.2, lambda tokens, of_row=of_row: 1 + of_row * (tokens - 1), measured=True)
            rule = CostRule(lambda entropy: 0.9, costs)
            rule.begin(rows)
            steps = 1
            while steps < 15 and rule.goes_on(*[0.5] * rows):
                steps += 1
            lengths.append(steps)
        assert lengths == [15, 1]


class TestPromptLookup:
    @pytest.mark.parametrize("count", [1, 3])
    def test_proposes_what_a_text_repeats(self, count, demo, geared_demo):
        prompts = [REPEATED, *PROMPTS[1:]][:count]
        expected = [alone(geared_demo, demo.tokenizer, prompt) for prompt in prompts]
        done = together(geared_demo, demo.tokenizer, prompts, mode=Lossless(cost="bytes"))
        assert tokens_of(done) == expected
        looked_up = [response for response in done.traces[0] if response.source == "lookup"]
        assert 0 < len(looked_up) <= sum(response.looked_up for response in done.traces[0])

    def test_can_be_turned_off(self, demo, geared_demo):
        done = together(geared_demo, demo.tokenizer, [REPEATED], mode=Lossless(cost="bytes", lookup_tokens=0))
        assert not any(response.looked_up for response in done.traces[0])
