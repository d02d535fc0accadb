import copy
import itertools
import math
import sys
import time

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import ARCHITECTURES, PROMPT, assert_same_text, mlx_lm_loop, same_weights, tiny_model, weights_of
from conftest import written as told
from lossless_texts import QUESTION, TWICE, assert_written, endless, written
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxWarning, Lossless, load, stream_generate
from gearbx_mlx.benchmark.measuring import counting_reads
from gearbx_mlx.decoding import sampling
from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.decoding.drafters.lookup import Lookup
from gearbx_mlx.decoding.learned import KeptPolicy
from gearbx_mlx.decoding.policy import FixedPolicy

PROCESSORS = {"plain": (), "repetition": tuple(make_logits_processors(repetition_penalty=1.3))}
TALE = "Once upon a time there was a king who"
SAMPLERS = {
    "greedy": None,
    "temperature": make_sampler(0.8),
    "top-p": make_sampler(0.8, top_p=0.9),
    "min-p": make_sampler(0.8, min_p=0.05),
    "top-k": make_sampler(1.0, top_k=20),
    "xtc": make_sampler(0.8, xtc_probability=0.5, xtc_threshold=0.1),
    "ours": gearbx_mlx.make_sampler(0.8),
    "ours, top-p": gearbx_mlx.make_sampler(0.8, top_p=0.9),
    "ours, xtc": gearbx_mlx.make_sampler(0.8, xtc_probability=0.5),
}

PENALTIES = make_logits_processors({5: -2.0}, presence_penalty=0.5, frequency_penalty=0.4)
KEYWORDS = {
    "repetition": {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "penalties, sampled": {"logits_processors": PENALTIES, "sampler": SAMPLERS["top-p"]},
    "quantized cache": {"kv_bits": 8, "quantized_kv_start": 0},
    "quantized on the way": {"kv_bits": 4, "quantized_kv_start": 45, "kv_group_size": 32},
    "rotating cache": {"prompt_cache": [RotatingKVCache(256, 4) for _ in range(6)]},
    "quantized cache of one's own": {"prompt_cache": [QuantizedKVCache(64, 8) for _ in range(6)]},
    "small prefill": {"prefill_step_size": 4},
    "token by token": {"prefill_step_size": 1},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "seven": {"max_tokens": 7},
}


@pytest.fixture(params=["mlx", "native"])
def kernels(request) -> str:
    """Kernels that give a row the same bits in any company: native ones, and MLX's except on a Mac."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    elif sys.platform == "darwin":
        pytest.skip("MLX's kernels on a Mac do not promise that a row has the same bits in any company")
    return request.param


def run_of(gearbox, tokenizer, prompt, tokens, mode="lossless", **keywords):
    """The run of so many tokens after a prompt."""
    return stream_generate(gearbox.model, tokenizer, prompt, tokens, gearbox=gearbox, mode=mode, **keywords)


class InTurn(FixedPolicy):
    """Drafts of these lengths, one after the other, and now and then the top gear alone."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = itertools.cycle(lengths)

    def length(self, room, early=False):
        self._length = next(self.lengths)
        return super().length(room)


class PlainTimes(FixedPolicy):
    """Plain decoding that records the seconds of its tokens."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def add_plain(self, seconds):
        self.seconds.append(seconds)


@pytest.mark.parametrize("pause", [0, 0.1])
def test_plain_time_excludes_slow_consumers(pause):
    """A pass that ran while the consumer paused would look faster than it is."""
    policy = PlainTimes()

    class Recording(Lossless):
        def policy_for(self, gearbox, drafter, chooser):
            return KeptPolicy(policy)

    gearbox = Gearbox(tiny_model(), "16", kernels="mlx")
    for _ in stream_generate(gearbox.model, endless(), PROMPT[0].tolist(), 6, gearbox=gearbox, mode=Recording()):
        time.sleep(pause)
    assert (len(policy.seconds) > 1) is (pause == 0)


class Varying(Lossless):
    """Drafts of all lengths in one text, and tokens alone in between, of which some run ahead."""

    def policy_for(self, gearbox, drafter, chooser):
        return KeptPolicy(InTurn((1, 5, 0, 2, 9, 0, 0, 0, 15, 3)))


def both(gearbox, tokenizer, prompt, seed=3, mode=None, **keywords):
    """mlx-lm in the top gear alone, and lossless mode, from the same random state; and the state afterwards."""
    lossless = mode or Lossless()
    runs = []
    for mode in (None, lossless):
        given = copy.deepcopy({name: value for name, value in keywords.items() if name != "sampler"})
        if keywords.get("sampler"):
            given["sampler"] = keywords["sampler"]
        gearbox.shift("high")
        mx.random.seed(seed)
        if mode is None:
            run = list(mlx_lm_loop(gearbox)(gearbox.model, tokenizer, prompt, **given))
        else:
            run = list(stream_generate(gearbox.model, tokenizer, prompt, gearbox=gearbox, mode=mode, **given))
        runs.append((run, mx.random.state[0].tolist()))
    return runs


class TestTopGearOutput:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_bit_for_bit_on_every_architecture(self, architecture, kernels):
        gearbox = Gearbox(tiny_model(architecture), "6,16", kernels=kernels)
        prompt = PROMPT[0].tolist()
        theirs = written(gearbox, prompt, 40)
        for mode in (Lossless(draft_length=1), Lossless(draft_length=4), Lossless(draft_length=15), Varying()):
            assert_written(written(gearbox, prompt, 40, mode), theirs)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", ["greedy", "top-p", "ours"])
    def test_with_every_draft_length_and_plain_decoding(self, kernels, sampler, processors):
        gearbox = Gearbox(tiny_model(), "6,16", kernels=kernels)
        given = {"sampler": SAMPLERS[sampler], "logits_processors": PROCESSORS[processors]}
        theirs = written(gearbox, PROMPT[0].tolist(), **given)
        assert_written(written(gearbox, PROMPT[0].tolist(), mode=Varying(), **given), theirs)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("architecture", ["gemma3_text", "mamba", "lfm2", "mixtral"])
    @pytest.mark.parametrize("length", [5, 64, 100])
    def test_with_windows_states_and_experts(self, architecture, length):
        gearbox, prompt = Gearbox(tiny_model(architecture), "6,16"), list(range(length))
        theirs, _ = written(gearbox, prompt, 60)
        ours, _ = written(gearbox, prompt, 60, Varying())
        assert [token for token, _ in ours] == [token for token, _ in theirs]

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("size", "keep"), [(20, 4), (20, 0), (8, 4), (3, 2)])
    @pytest.mark.parametrize("length", [5, 30])
    def test_in_a_window_with_and_without_sinks(self, tiny, size, keep, length):
        gearbox, prompt = Gearbox(tiny, "6,16"), list(range(length))
        caches = [[RotatingKVCache(size, keep) for _ in tiny.layers] for _ in range(2)]
        theirs, _ = written(gearbox, prompt, 60, prompt_cache=caches[0])
        ours, _ = written(gearbox, prompt, 60, Varying(), prompt_cache=caches[1])
        assert [token for token, _ in ours] == [token for token, _ in theirs]

    @pytest.mark.slow
    def test_row_is_batch_invariant(self, demo, kernels):
        model, _ = mlx_lm.load(str(demo.path))
        gearbox = Gearbox(model, "4,8,16", kernels=kernels)
        tokens = demo.tokenizer.encode(QUESTION * 16)
        for gear, start in itertools.product(gearbox.ladder if kernels == "native" else ("high",), (1, 64, 257)):
            gearbox.shift("high")
            cache = make_prompt_cache(model)
            gearbox.model(mx.array(tokens[:start])[None], cache=cache)
            gearbox.shift(gear)
            single, before = [], Snapshot(cache)
            for token in tokens[start : start + 16]:
                single.append(model(mx.array([[token]]), cache=cache)[0, 0])
                mx.eval(single)
            for count in (2, 7, 16):
                before.restore()
                many = model(mx.array(tokens[start : start + count])[None], cache=cache)[0]
                assert mx.array_equal(many, mx.stack(single[:count]))

    @pytest.mark.some(2)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("prompt", [QUESTION, TALE])
    def test_same_seed_draws_same_tokens(self, geared_demo, demo, sampler, prompt):
        given = {"max_tokens": 50, "sampler": SAMPLERS[sampler], "mode": Lossless(lookup_tokens=0)}
        (theirs, after), (ours, after_ours) = both(geared_demo, demo.tokenizer, prompt, **given)
        assert_same_text(told(ours), told(theirs))
        assert after == after_ours  # so the next draws are the same too
        assert any(r.from_draft for r in ours)

    @pytest.mark.some(4)
    @pytest.mark.parametrize("prompt", [QUESTION, TWICE], ids=["drafted", "looked up too"])
    @pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
    def test_with_every_keyword_of_mlx_lm(self, geared_demo, demo, keywords, prompt):
        given = {"max_tokens": 45} | keywords
        (theirs, after), (ours, after_ours) = both(geared_demo, demo.tokenizer, prompt, **given)
        assert_same_text(told(ours), told(theirs))
        assert after == after_ours

    def test_processors_are_given_the_tokens_before_each_place(self, geared_demo, demo):
        seen = []

        def processor(tokens, logits):
            seen.append(tokens.tolist())
            return logits

        prompt = demo.tokenizer.encode(QUESTION)
        made = [r.token for r in run_of(geared_demo, demo.tokenizer, prompt, 30, logits_processors=[processor])]
        checks = [prompt + made[:i] for i in range(len(made) + 1)]
        drafts = seen.copy()
        for tokens in checks:
            drafts.remove(tokens)
        assert all(tokens[: len(prompt)] == prompt and len(tokens) < len(prompt) + 30 for tokens in drafts)
        assert sum(tokens in checks for tokens in drafts) > 15  # drafts on the right path attend to the same tokens

    def test_separate_prompts_and_8_bit_gears(self, demo):
        model, tokenizer = mlx_lm.load(str(demo.path))
        gearbox = Gearbox(model, "3,8", kernels="auto")
        for prompt in (QUESTION, TALE):
            (theirs, _), (ours, _) = both(gearbox, tokenizer, prompt, max_tokens=40)
            assert_same_text(told(ours), told(theirs))

    def test_stop_tokens_inside_draft_end_output(self, geared_demo, demo):
        tokenizer = copy.deepcopy(demo.tokenizer)
        (theirs, _), _ = both(geared_demo, tokenizer, QUESTION, max_tokens=40)
        tokenizer.eos_token_ids = {theirs[20].token}
        (theirs, _), (ours, _) = both(geared_demo, tokenizer, QUESTION, max_tokens=40, mode=Lossless(draft_length=15))
        assert_same_text(told(ours), told(theirs))
        assert ours[-1].finish_reason == "stop"
        assert len(ours) <= 21

    def test_model_is_left_in_unchanged_top_gear(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, "3,16", kernels="auto")
        before = weights_of(fresh_demo.model)
        list(run_of(gearbox, fresh_demo.tokenizer, TALE, 12))
        assert gearbox.gear.name == "high"
        assert same_weights(before, weights_of(fresh_demo.model))


class TestCache:
    @pytest.mark.parametrize("ends", ["length", "stop", "closed"])
    def test_entries_equal_plain_decoding(self, geared_demo, demo, ends):
        tokenizer = copy.deepcopy(demo.tokenizer)

        def begun():
            """Return the cache of an earlier turn."""
            cache = make_prompt_cache(demo.model)
            geared_demo.shift("high")
            demo.model(mx.array([tokenizer.encode(TALE)]), cache=cache)
            return cache

        if ends == "stop":
            run = mlx_lm.stream_generate(demo.model, tokenizer, QUESTION, 30, prompt_cache=begun())
            tokenizer.eos_token_ids = {[r.token for r in run][17]}
        caches = []
        for mode in (None, "lossless"):
            cache = begun()
            if mode is None:
                run = mlx_lm.stream_generate(demo.model, tokenizer, QUESTION, 30, prompt_cache=cache)
            else:
                run = run_of(geared_demo, tokenizer, QUESTION, 30, prompt_cache=cache)
            taken = list(itertools.islice(run, 12)) if ends == "closed" else list(run)
            assert taken
            run.close()
            caches.append(cache)
        for mine, other in zip(*caches, strict=True):
            assert mine.offset == other.offset
            for a, b in zip(mine.keys_and_values(), other.keys_and_values()):
                assert mx.array_equal(a, b)

    @pytest.mark.parametrize("keeps", [True, False], ids=["with its cache", "without"])
    @pytest.mark.parametrize("taken", [1, 2, 4, 5, 6])
    def test_closed_sampling_draws_numbers_of_next_token(self, tiny, kernels, taken, keeps):
        """As in mlx-lm, which runs ahead, whatever was drafted."""
        gearbox, tokenizer, after = Gearbox(tiny, "6,16", kernels=kernels), endless(), []
        for mode in (None, Lossless(draft_length=3)):
            cache = {"prompt_cache": make_prompt_cache(tiny)} if keeps else {}
            gearbox.shift("high")
            mx.random.seed(7)
            given = {"sampler": SAMPLERS["ours"]} | cache
            if mode is None:
                run = mlx_lm_loop(gearbox)(tiny, tokenizer, PROMPT[0].tolist(), 30, **given)
            else:
                run = run_of(gearbox, tokenizer, PROMPT[0].tolist(), 30, mode, **given)
            assert len(list(itertools.islice(run, taken))) == taken
            run.close()
            after.append(mx.random.state[0].tolist())
        assert after[0] == after[1]

    def test_failed_drafting_continues_with_plain_decoding(self, tiny):
        class OneAtATime(RotatingKVCache):
            low = False

            def update_and_fetch(self, keys, values):
                if gearbox.gear.name == "low":
                    raise ValueError("no drafts here")
                return super().update_and_fetch(keys, values)

        gearbox = Gearbox(tiny, "6,16")
        caches = [[OneAtATime(20) for _ in tiny.layers] for _ in range(2)]
        theirs, _ = written(gearbox, PROMPT[0].tolist(), 30, prompt_cache=caches[0])
        with pytest.warns(GearbxWarning, match=r"drafting failed \(6 bits: no drafts here\)") as said:
            ours, _ = written(gearbox, PROMPT[0].tolist(), 30, Lossless(draft_length=6), prompt_cache=caches[1])
        assert len(said) == 1
        assert [token for token, _ in ours] == [token for token, _ in theirs]

    def test_drafter_that_fails_after_a_pass_is_dropped(self, tiny, monkeypatch):
        def update(self, text, found):
            raise ValueError("no room")

        monkeypatch.setattr(Lookup, "update", update)
        gearbox = Gearbox(tiny, "6,16")
        with pytest.warns(GearbxWarning, match=r"drafting failed \(prompt lookup: no room\)") as said:
            ours, _ = written(gearbox, PROMPT[0].tolist(), 30, Lossless())
        assert len(said) == 1
        assert [token for token, _ in ours] == [token for token, _ in written(gearbox, PROMPT[0].tolist(), 30)[0]]

    def test_interrupt_while_waiting_keeps_yielded_tokens(self, tiny, monkeypatch):
        """Plain decoding one token ahead: the pass that was queued is dropped."""
        calls, own = [], sampling.wait_for

        def interrupted(array):
            calls.append(array)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return own(array)

        monkeypatch.setattr(sampling, "wait_for", interrupted)
        gearbox, prompt = Gearbox(tiny, "16", kernels="mlx"), PROMPT[0].tolist()
        cache, made = make_prompt_cache(tiny), []
        run = run_of(gearbox, endless(), prompt, 30, Lossless(lookup_tokens=0), prompt_cache=cache)
        with pytest.raises(KeyboardInterrupt):
            made.extend(r.token for r in run)
        assert {part.offset for part in cache} == {len(prompt) + len(made)}

    def test_interrupt_within_round_keeps_output(self, geared_demo, demo):
        """A processor that is interrupted in the middle of a verification: the cache goes on as if it had not been."""
        prompt, calls = demo.tokenizer.encode(QUESTION), []

        def interrupted(tokens, logits):
            calls.append(len(tokens))
            if len(calls) == 21:
                raise KeyboardInterrupt
            return logits

        cache, made = make_prompt_cache(demo.model), []
        given = {"prompt_cache": cache, "logits_processors": [interrupted]}
        run = run_of(geared_demo, demo.tokenizer, prompt, 30, Lossless(draft_length=4), **given)
        with pytest.raises(KeyboardInterrupt):
            made.extend(r.token for r in run)
        geared_demo.shift("high")
        known = [*prompt, *made][: cache[0].offset]
        assert len(known) >= len(prompt) + len(made) - 1
        other = make_prompt_cache(demo.model)
        demo.model(mx.array([known]), cache=other)
        following = [demo.model(mx.array([[7]]), cache=each) for each in (cache, other)]
        assert mx.allclose(*following, atol=1e-4)


class TestCounts:
    def test_tokens_drafts_verifications_and_bytes(self, geared_demo, demo):
        responses = list(run_of(geared_demo, demo.tokenizer, QUESTION, 40, Lossless(draft_length=4)))
        low, high = (geared_demo.weight_bytes_per_token(gear) for gear in geared_demo.ladder)
        drafted, checks = sum(r.drafted for r in responses), sum(r.passes[1] for r in responses)
        accepted = sum(r.from_draft for r in responses)
        assert accepted + checks == len(responses) == 40
        assert drafted == sum(r.passes[0] for r in responses) >= accepted
        assert sum(r.weight_bytes for r in responses) == drafted * low + checks * high
        assert all(r.gear == ("low" if r.from_draft else "high") for r in responses)
        assert all(r.drafted <= 4 for r in responses)
        logprobs = np.array(responses[0].logprobs, np.float64)
        # The kernel takes it from float32 logits, and sums 4096 of them in an order of its own.
        assert responses[0].entropy == pytest.approx(-np.sum(np.exp(logprobs) * logprobs) / math.log(2), abs=1e-5)

    def test_verification_reads_more_experts_than_token(self):
        gearbox = Gearbox(tiny_model("mixtral"), "4,16")  # 2 experts of 4
        top = gearbox.ladder.top
        one, two, many = (gearbox.weight_bytes_per_token(top, n) for n in (1, 2, 16))
        row = 64 * 4  # of the embedding
        assert one < two
        assert many - two == 14 * row

    def test_near_ties_are_reported(self):
        model = tiny_model("llama")
        # Two tokens with equal logits: rounding may decide between them in either way.
        model.lm_head.weight = mx.concatenate([model.lm_head.weight[:64]] * 2)
        gearbox = Gearbox(model, "6,16")
        checked = [r.near_tie for r in run_of(gearbox, load()[1], [1, 5, 9], 12, Lossless(draft_length=3))]
        assert sum(checked) >= len(checked) - 1

    def test_output_without_near_ties_reports_none(self, geared_demo, demo):
        assert not any(r.near_tie for r in run_of(geared_demo, demo.tokenizer, QUESTION, 30))


@pytest.mark.parametrize(("ladder", "sampler"), [("6,16", None), ("6,16", "ours"), ("6,16", "top-p"), ("16", None)])
def test_mlx_round_waits_for_device_once(ladder, sampler):
    gearbox = Gearbox(tiny_model(), ladder, kernels="mlx")
    mode, given = Lossless(draft_length=3, lookup_tokens=0), {"sampler": SAMPLERS.get(sampler)}
    run = run_of(gearbox, endless(), [1, 5, 9], 40, mode, **given)
    with counting_reads() as reads:  # how often an array becomes Python's or numpy's
        next(run)
        reads.count = 0
        rounds = sum(response.passes[-1] for response in run)
    assert (40 // 4 <= rounds < 39) if "," in ladder else rounds == 39
    assert reads.count <= rounds
