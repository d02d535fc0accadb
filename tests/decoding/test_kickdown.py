import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from conftest import ARCHITECTURES, KEYWORDS, PROMPT, assert_same_text, same_weights, tiny_model, weights_of, written
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError, Kickdown, entropy_bits, stream_generate
from gearbx_mlx.decoding.kickdown import GearedModel

TALE = "Once upon a time there was a king who"


def climb_to(gear):
    """A decision that stops at a gear, for any entropy."""
    return lambda entropy, position, at: at < gear


def by_hand(model, gearbox, prompt, tokens, thresholds):
    """Kickdown written out: every gear starts from a copy that has only the tokens and gears before."""
    chosen = []
    cache = make_prompt_cache(model)
    gearbox.shift(gearbox.ladder.top)
    model(mx.array(prompt[:-1])[None], cache=cache)
    logits_of, last = [], prompt[-1]
    for token in tokens:
        for gear in gearbox.ladder:
            gearbox.shift(gear)
            logits = model(mx.array([[last]]), cache=cache)[0, -1]
            done = gear == gearbox.ladder.top or entropy_bits(logits).item() <= thresholds[gear.index]
            if done:
                break
            for entry in cache:
                entry.trim(1)
        chosen.append(gear.name)
        logits_of.append(logits)
        last = token
    return chosen, logits_of


class TestGearedModel:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("gear", [0, 1])
    def test_held_in_one_gear_it_is_that_gear(self, architecture, gear):
        model = tiny_model(architecture)
        gearbox = Gearbox(model, "4,16")
        geared = GearedModel(gearbox, rule=climb_to(gear), prefill=gearbox.ladder[gear])
        ours = [token for token, _ in zip(generate_step(PROMPT[0], geared, max_tokens=12), range(12))]
        gearbox.shift(gearbox.ladder[gear])
        theirs = list(generate_step(PROMPT[0], model, max_tokens=12))
        for (mine, logprobs), (token, expected) in zip(ours, theirs, strict=True):
            assert mine == token
            assert np.array_equal(np.array(logprobs), np.array(expected))

    @pytest.mark.slow
    def test_climbs_exactly_where_it_is_in_doubt(self, fresh_demo):
        model, tokenizer = fresh_demo.model, fresh_demo.tokenizer
        gearbox = Gearbox(model, "4,8,16", kernels="mlx")
        responses = list(stream_generate(model, tokenizer, TALE, 40, gearbox=gearbox, mode=Kickdown((4.0, 5.0))))
        chosen, logits_of = by_hand(model, gearbox, tokenizer.encode(TALE), [r.token for r in responses], (4.0, 5.0))
        assert [r.gear for r in responses] == chosen
        assert set(chosen) == {"low", "mid", "high"}
        for response, logits in zip(responses, logits_of):
            assert np.array_equal(np.array(logits - mx.logsumexp(logits)), np.array(response.logprobs))
            assert response.entropy == pytest.approx(entropy_bits(logits).item(), abs=1e-5)

    def test_a_decision_of_ones_own_sees_entropy_position_and_gear(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, "4,8,16")
        seen = []

        def every_third(entropy, position, gear):
            seen.append((entropy, position, gear))
            return position % 3 == 0

        how = {"gearbox": gearbox, "mode": Kickdown(rule=every_third)}
        responses = list(stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, 9, **how))
        assert [r.gear for r in responses] == ["high", "low", "low"] * 3
        assert [(position, gear) for _, position, gear in seen[:5]] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
        entropies = [entropy for entropy, position, _ in seen if position % 3]
        assert entropies[:6] == pytest.approx([r.entropy for r in responses if r.gear == "low"], abs=1e-5)

    def test_a_batch_and_a_prompt_are_computed_in_the_prefill_gear(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        geared = GearedModel(gearbox, (0.0,), prefill="low")
        batch = mx.array([[1], [2]])
        for inputs in (PROMPT, batch):
            mine = geared(inputs)
            gearbox.shift("low")
            assert mx.array_equal(mine, tiny(inputs))

    def test_thresholds_fit_the_ladder(self, tiny):
        with pytest.raises(GearbxError, match="2 gears need 1 thresholds"):
            GearedModel(Gearbox(tiny, "4,16"), (1.0, 2.0))
        with pytest.raises(GearbxError, match="ascend"):
            GearedModel(Gearbox(tiny, "4,8,16"), (2.0, 1.0))


class TestDropIn:
    def test_everything_else_is_the_models(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        geared = GearedModel(gearbox, (1.0,))
        assert isinstance(geared, nn.Module)
        assert geared.layers is tiny.layers
        assert geared.args is tiny.args
        assert geared.model_type == "llama"
        assert hasattr(geared, "make_cache") == hasattr(tiny, "make_cache")
        for gear in gearbox.ladder:
            gearbox.shift(gear)
            assert same_weights(weights_of(geared), weights_of(tiny))
            names = [name for name, _ in tiny.named_modules()]
            assert [name for name, _ in geared.named_modules()] == names
        geared.update({"model": {"norm": {"weight": mx.zeros_like(tiny.model.norm.weight)}}})
        assert not tiny.model.norm.weight.any()
        with pytest.raises(AttributeError):
            _ = geared.no_such_thing

    @pytest.mark.some(1)
    @pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
    def test_in_the_top_gear_it_is_mlx_lm_with_every_keyword(self, demo, geared_demo, keywords):
        runs = []
        for model in (demo.model, GearedModel(geared_demo, rule=climb_to(1))):
            geared_demo.shift("high")
            mx.random.seed(4)
            runs.append(written(mlx_lm.stream_generate(model, demo.tokenizer, TALE, **{"max_tokens": 25} | keywords)))
        assert_same_text(*runs)

    def test_a_prompt_is_read_in_its_gear_however_it_is_cut(self, demo, geared_demo):
        prompt, found = demo.tokenizer.encode(TALE), []
        for step in (2048, len(prompt) - 2, 3, 1):
            how = {"mode": Kickdown([99.0], prompt_gear="high"), "gearbox": geared_demo, "prefill_step_size": step}
            found.append(np.array(next(stream_generate(demo.model, demo.tokenizer, prompt, 1, **how)).logprobs))
        for logprobs in found[1:]:
            np.testing.assert_allclose(logprobs, found[0], atol=1e-3)

    def test_input_embeddings_go_to_models_that_take_them(self):
        model = tiny_model("gemma3_text")
        gearbox = Gearbox(model, "4,16")
        geared = GearedModel(gearbox, (1.0,))
        embedded = model.model.embed_tokens(PROMPT)
        logits = [m(PROMPT, input_embeddings=embedded + 0) for m in (geared, model)]  # which gemma scales in place
        assert mx.array_equal(*logits)
        with pytest.raises(GearbxError, match="takes no input embeddings"):
            GearedModel(Gearbox(tiny_model("gpt_neox"), "4,16"), (1.0,))(PROMPT, input_embeddings=embedded)
