"""Two models that take turns (EAD)."""

import itertools
import json
import math

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import KEYWORDS, Script, assert_same_text, save_model, stream_pair, tiny_model, weights_of, written
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError, Governor, Pair, stream_generate
from gearbx_mlx.compat.loops import streaming_with
from gearbx_mlx.decoding.pair import PairVerifier, TrailingCache, bytes_read, pair_cache
from gearbx_mlx.decoding.sampling import entropy_bits, reader_of
from gearbx_mlx.loading import check_same_tokenizer
from gearbx_mlx.routing.gates import replay
from gearbx_mlx.routing.pair import EAD_BITS, LARGE, SMALL, pair_gate, pair_monitor, scaled

TOKENS = 4096  # of the demo model's tokenizer
TALE = "Once upon a time there was a king who"


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=1, vocab_size=TOKENS)


@pytest.fixture(scope="module")
def large():
    return tiny_model(seed=2, vocab_size=TOKENS, num_hidden_layers=3, hidden_size=96, num_attention_heads=3)


@pytest.mark.some(2)
@pytest.mark.parametrize(("threshold", "alone"), [(0.0, "large"), (math.inf, "small"), (99.0, "small")])
@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
def test_single_model_output_equals_mlx_lm(demo, small, large, threshold, alone, keywords):
    keywords = {"max_tokens": 25} | keywords
    mx.random.seed(3)
    stream = streaming_with(reader_of().logsumexp)  # mlx-lm's, with the log-probabilities of this processor
    theirs = written(stream({"small": small, "large": large}[alone], demo.tokenizer, TALE, **keywords))
    mx.random.seed(3)
    responses = list(stream_pair(small, large, demo.tokenizer, TALE, threshold=threshold, **keywords))
    assert_same_text(written(responses), theirs)
    assert {r.gear for r in responses} == {alone}
    assert not any(r.shifted or r.caught_up or sum(r.passes) != 1 for r in responses)


class TestCachesInStep:
    SCRIPT = [0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1]

    @pytest.mark.some(2)
    @pytest.mark.parametrize("keywords", [{}, {"prefill_step_size": 3}], ids=["one pass", "in pieces"])
    @pytest.mark.parametrize("initial", ["small", "large"])
    def test_each_token_follows_complete_cache(self, demo, small, large, initial, keywords):
        how = {"gate": Script(self.SCRIPT), "initial": initial} | keywords
        responses = list(stream_pair(small, large, demo.tokenizer, TALE, 16, **how))
        models, text = {"small": small, "large": large}, demo.tokenizer.encode(TALE)
        assert [r.gear for r in responses] == [initial, *(["small", "large"][g] for g in self.SCRIPT[:15])]
        for response in responses:
            logits = models[response.gear](mx.array([text]))[0, -1]
            expected = np.array(logits - mx.logsumexp(logits))
            # The float32 difference between one pass over many positions and single steps.
            assert np.allclose(np.array(response.logprobs), expected, rtol=0, atol=2e-5)
            assert response.token == int(mx.argmax(response.logprobs))
            assert response.entropy == pytest.approx(float(entropy_bits(logits)), abs=1e-4)
            text.append(response.token)

    def test_catching_up_equals_same_passes_bitwise(self, small, large):
        turns, cache, alone = PairVerifier(small, large, SMALL), pair_cache(small, large), make_prompt_cache(large)
        tokens = mx.array([5, 9, 2, 7, 3, 8, 1])
        for start, stop in [(0, 3), (3, 4), (4, 6)]:
            turns.prefill(tokens[start:stop], cache)
        turns.engaged = LARGE
        turn = turns.verify([1], cache)
        assert turn.step.caught_up == 6
        assert turn.step.passes == (0, 1)
        assert mx.array_equal(turn.logits, large(tokens[None], cache=alone)[:, -1:]).item()

    def test_discarded_turn_leaves_both_caches_unchanged(self, small, large):
        turns, cache = PairVerifier(small, large, SMALL), pair_cache(small, large)
        turns.prefill(mx.array([5, 9, 2, 7]), cache)
        for engaged, model in ((LARGE, large), (SMALL, small)):
            turns.engaged = engaged
            turns.verify([3], cache).keep(0)
            assert [entry.total_tokens for entry in cache] == [4, 4]
            expected = model(mx.array([[5, 9, 2, 7, 8]]))[:, -1]
            turn = turns.verify([8], cache)
            assert mx.allclose(turn.logits[:, -1], expected, atol=2e-5)
            turn.keep(0)

    def test_catching_up_reads_missed_tokens(self, demo, small, large):
        prompt = len(demo.tokenizer.encode(TALE))
        responses = list(stream_pair(small, large, demo.tokenizer, TALE, 8, gate=Script([0, 0, 1, 1, 1, 0, 0, 1, 1])))
        # The large one misses the prompt and two tokens; then the small one misses what the large one read alone.
        assert [r.caught_up for r in responses] == [0, 0, 0, prompt + 2, 0, 0, 3, 0]
        assert [r.shifted for r in responses] == [False, False, False, True, False, False, True, False]

    def test_long_stretches_are_caught_up_in_pieces(self, demo, small, large):
        prompt = len(demo.tokenizer.encode(TALE))
        keywords = {"prefill_step_size": 4, "gate": Script([0, 1, 1])}
        responses = list(stream_pair(small, large, demo.tokenizer, TALE, 3, **keywords))
        assert [r.passes for r in responses] == [(1, 0), (1, 0), (0, math.ceil((prompt + 2) / 4))]
        assert responses[2].weight_bytes == math.ceil((prompt + 2) / 4) * bytes_read(large)

    @pytest.mark.parametrize("trims", [(3,), (1, 2), (1,)], ids=str)
    def test_trimmed_caches_forget_unread_tokens_first(self, small, large, trims):
        turns, cache = PairVerifier(small, large, SMALL), pair_cache(small, large)
        turns.prefill(mx.array([5, 9, 2, 7]), cache)
        turns.engaged = LARGE
        turns.verify([3], cache)
        turns.engaged = SMALL
        turns.prefill(mx.array([8, 4]), cache)  # the large one misses two
        assert [mlx_lm.models.cache.trim_prompt_cache(cache, n) for n in trims] == [*trims]
        left = [5, 9, 2, 7, 3, 8, 4][: -sum(trims)]
        for engaged, model in enumerate((small, large)):
            turns.engaged = engaged
            logits = turns.verify([6], cache).logits
            expected = model(mx.array([left + [6] * (1 + engaged)]))
            assert np.allclose(np.array(logits[0, -1]), np.array(expected[0, -1]), atol=2e-5)


class TestGate:
    def test_the_paper_by_hand(self):
        entropies = [0.0, 0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0]
        gears = replay(entropies, pair_monitor(TOKENS, 2), pair_gate(0.75, 3))
        # Means over two: 0 0 0 0 .75 1.5 1.5 .75 0 ...; up when above .75, down at .75 and below, held for three.
        assert gears == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]

    def test_a_model_is_kept_for_its_minimum_duration(self, demo, small):
        responses = list(stream_pair(small, demo.model, demo.tokenizer, TALE, 80, threshold=5.0, min_duration=7))
        runs = [len(list(run)) for _, run in itertools.groupby(responses, lambda r: r.gear)]
        assert len(runs) > 3
        assert min(runs[:-1]) == 7

    def test_gears_and_means_match_gate(self, demo, small):
        how = {"threshold": 5.0, "window": 3, "min_duration": 4}
        responses = list(stream_pair(small, demo.model, demo.tokenizer, TALE, 80, **how))
        entropies = [r.entropy for r in responses]
        gears = replay(entropies, pair_monitor(TOKENS, 3), pair_gate(5.0, 4))
        assert [r.gear for r in responses] == ["small", *(["small", "large"][g] for g in gears[:-1])]
        for i, response in enumerate(responses):
            assert response.mean_entropy == pytest.approx(np.mean(entropies[max(0, i - 2) : i + 1]))
            assert response.shifted == (i > 0 and response.gear != responses[i - 1].gear)
        assert len(set(gears)) == 2

    def test_the_papers_thresholds_grow_with_the_vocabulary(self):
        assert scaled(0.25, 2**17) == 0.25
        assert scaled(0.25, TOKENS) == pytest.approx(0.25 * 12 / 17)

    @pytest.mark.parametrize("threshold", [-0.1, math.nan, -math.inf])
    def test_invalid_threshold_is_refused(self, threshold):
        with pytest.raises(GearbxError, match="threshold of a pair: must be 0 bits"):
            pair_gate(threshold)


class TestPairRefusals:
    def test_model_lacking_the_tokens(self, demo, large):
        with pytest.raises(GearbxError, match="small model: must have a vocabulary of 4096 tokens or more, got 128"):
            stream_pair(tiny_model(), large, demo.tokenizer, TALE)

    @pytest.mark.parametrize(
        ("name", "complaint"),
        [
            ("draft_model", "draft model"),
            ("input_embeddings", "no input_emb"),
            ("prompt_cache", r"use Pair.make_cache\(model\)"),
        ],
    )
    def test_unsupported_pair_options(self, demo, small, large, name, complaint):
        given = make_prompt_cache(large) if name == "prompt_cache" else small
        with pytest.raises(GearbxError, match=complaint):
            stream_pair(small, large, demo.tokenizer, TALE, **{name: given})

    @pytest.mark.parametrize("token", [-1, TOKENS, 100000])
    def test_unknown_token_is_refused(self, demo, small, large, token):
        with pytest.raises(GearbxError, match=f"prompt: tokens must be 0 to {TOKENS - 1}, got {token}"):
            stream_pair(small, large, demo.tokenizer, [5, token])

    def test_controller_is_refused(self, fresh_demo, small):
        controller = Governor(Gearbox(fresh_demo.model, "4,16"))
        with pytest.raises(GearbxError, match="mode 'pair': changes no gear that could be capped"):
            stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, mode=Pair(small), controller=controller)

    def test_other_tokenizer_is_refused(self, demo):
        class Other:
            def __init__(self, vocabulary, encode):
                self.get_vocab, self.encode = lambda: vocabulary, encode

        own = demo.tokenizer
        check_same_tokenizer(own, own, "S")
        with pytest.raises(GearbxError, match=r"^S: its tokenizer is not the model's: 2 and 4096 tokens, of which"):
            check_same_tokenizer(Other({"a": 0, "b": 1}, own.encode), own, "S")
        with pytest.raises(GearbxError, match=r"^S: its tokenizer splits"):
            check_same_tokenizer(Other(own.get_vocab(), lambda text: own.encode(text.lower())), own, "S")


class TestConstruction:
    def test_a_small_model_means_a_pair(self, demo, small):
        responses = list(stream_generate(demo.model, demo.tokenizer, TALE, 15, mode=Pair(small)))
        # The paper's defaults: the mean over five, ten tokens of the small model, a threshold far below either model's.
        assert [r.gear for r in responses] == ["small"] * 10 + ["large"] * 5

    def test_a_gearbox_of_one_model(self, fresh_demo, small):
        gearbox = Gearbox(fresh_demo.model, "4,16")
        with pytest.raises(GearbxError, match="both models unchanged, got a gearbox; omit it"):
            stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, mode=Pair(small), gearbox=gearbox)


class TestGenerate:
    @pytest.fixture
    def small_path(self, small, tmp_path):
        save_model(small, tmp_path / "small")
        return tmp_path / "small"

    def test_without_a_threshold_it_is_the_papers(self, generated, small_path):
        bits = pytest.approx(scaled(EAD_BITS, 4096))
        assert generated("--small-model", small_path, "-m", 4).summary["threshold_bits"] == bits

    def test_summary_and_trace(self, generated, small_path, small, demo, tmp_path):
        gate = {"thresholds": [5.0], "window": 3, "min_gear_duration": 4}
        (tmp_path / "gate.json").write_text(json.dumps({"schema": "gearbx-mlx thresholds", "version": 1, **gate}))
        flags = "--thresholds", tmp_path / "gate.json", "-m", 40
        result = generated("--mode", "pair", "--small-model", small_path, *flags)
        rows, told = result.trace, result.summary
        assert result.out.rstrip("\n") == "".join(row["text"] for row in rows).rstrip("\n")
        assert [row["gear"] for row in rows[:4]] == ["small"] * 4
        count = {name: sum(row["gear"] == name for row in rows) for name in ("small", "large")}
        assert min(count.values()) > 0
        assert told["mode"] == "pair"
        assert told["gear_tokens"] == told["passes"] == count
        assert told["shares"] == {name: n / len(rows) for name, n in count.items()}
        assert told["caught_up_tokens"] == sum(row["caught_up"] for row in rows) > told["prompt_tokens"]
        assert told["shifts"] == sum(row["shifted"] for row in rows)
        assert told["parameters"] == {"small": parameters(small), "large": parameters(demo.model)}
        ratio = (count["small"] * parameters(small) + count["large"] * parameters(demo.model)) / len(rows)
        assert told["parameter_ratio"] == pytest.approx(ratio / parameters(demo.model))
        read = count["small"] * bytes_read(small) + count["large"] * bytes_read(demo.model)
        assert told["weight_bytes_per_token"] == pytest.approx(read / len(rows))
        assert told["weight_bytes_per_token_top"] == bytes_read(demo.model)
        assert "tokens prefilled by the other model" in result.err


def parameters(model) -> int:
    return sum(array.size for array in weights_of(model).values())


def test_a_trailing_cache_forgets_unread_tokens_first():
    model = tiny_model("llama")
    cache = TrailingCache(make_prompt_cache(model))
    model(mx.array([[1, 2, 3]]), cache=cache.entries)
    cache.missed = [mx.array([[4, 5]])]
    assert cache.trim(1) == 1
    assert (cache.total_tokens, cache.missing, cache.offset) == (4, 1, 3)
    assert cache.trim(2) == 2
    assert (cache.total_tokens, cache.missing, cache.offset) == (2, 0, 2)
