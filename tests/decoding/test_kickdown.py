import mlx.core as mx
import numpy as np
import pytest
from conftest import ARCHITECTURES, KEYWORDS, PROMPT, assert_same_text, mlx_lm_loop, tiny_model, written
from lossless_texts import endless
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError, Kickdown, Static, entropy_bits, stream_generate

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


class TestKickdown:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("gear", [0, 1])
    def test_held_gear_equals_that_gear(self, architecture, gear):
        gearbox = Gearbox(tiny_model(architecture), "4,16")
        name, how = gearbox.ladder[gear].name, {"gearbox": gearbox}
        texts = []
        for mode in (Kickdown(rule=climb_to(gear), prompt_gear=name), Static(name, prompt_gear=name)):
            texts.append(list(stream_generate(gearbox.model, endless(), PROMPT[0].tolist(), 12, mode=mode, **how)))
        for mine, theirs in zip(*texts, strict=True):
            assert mine.token == theirs.token
            assert np.array_equal(np.array(mine.logprobs), np.array(theirs.logprobs))

    @pytest.mark.slow
    def test_climbs_exactly_in_doubt(self, fresh_demo):
        model, tokenizer = fresh_demo.model, fresh_demo.tokenizer
        gearbox = Gearbox(model, "4,8,16", kernels="mlx")
        responses = list(stream_generate(model, tokenizer, TALE, 40, gearbox=gearbox, mode=Kickdown((4.0, 5.0))))
        chosen, logits_of = by_hand(model, gearbox, tokenizer.encode(TALE), [r.token for r in responses], (4.0, 5.0))
        assert [r.gear for r in responses] == chosen
        assert set(chosen) == {"low", "mid", "high"}
        for response, logits in zip(responses, logits_of):
            assert np.array_equal(np.array(logits - mx.logsumexp(logits)), np.array(response.logprobs))
            assert response.entropy == pytest.approx(entropy_bits(logits).item(), abs=1e-5)

    def test_custom_decision_receives_entropy_position_and_gear(self, fresh_demo):
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

    @pytest.mark.parametrize(
        ("ladder", "bits", "complaint"),
        [("4,16", (1.0, 2.0), "2 gears need 1 thresholds"), ("4,8,16", (2.0, 1.0), "ascend")],
    )
    def test_thresholds_fit_the_ladder(self, ladder, bits, complaint):
        gearbox = Gearbox(tiny_model(), ladder)
        with pytest.raises(GearbxError, match=complaint):
            stream_generate(gearbox.model, endless(), [1, 2], mode=Kickdown(bits), gearbox=gearbox)


class TestKeywords:
    @pytest.mark.some(1)
    @pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
    def test_top_gear_matches_mlx_lm_with_every_keyword(self, demo, geared_demo, keywords):
        runs = []
        for mode in (None, Kickdown(rule=climb_to(1), prompt_gear="high")):
            geared_demo.shift("high")
            mx.random.seed(4)
            given = {"max_tokens": 25} | keywords
            if mode is None:
                run = mlx_lm_loop(geared_demo)(demo.model, demo.tokenizer, TALE, **given)
            else:
                run = stream_generate(demo.model, demo.tokenizer, TALE, mode=mode, gearbox=geared_demo, **given)
            runs.append(written(run))
        assert_same_text(*runs)

    def test_prefill_gear_is_same_for_any_split(self, demo, geared_demo):
        prompt, found = demo.tokenizer.encode(TALE), []
        for step in (2048, len(prompt) - 2, 3, 1):
            how = {"mode": Kickdown([99.0], prompt_gear="high"), "gearbox": geared_demo, "prefill_step_size": step}
            found.append(np.array(next(stream_generate(demo.model, demo.tokenizer, prompt, 1, **how)).logprobs))
        for logprobs in found[1:]:
            np.testing.assert_allclose(logprobs, found[0], atol=1e-3)

    def test_input_embeddings_reach_supporting_models(self):
        model = tiny_model("qwen3")
        gearbox, prompt = Gearbox(model, "4,16"), PROMPT[0].tolist()
        how = {"gearbox": gearbox, "mode": Kickdown((1.0,))}
        run = stream_generate(model, endless(), prompt, 9, **how)
        vectors = model.model.embed_tokens(PROMPT)[0]
        embedded = stream_generate(model, endless(), prompt, 9, **how, input_embeddings=vectors)
        assert [r.token for r in embedded] == [r.token for r in run]
        other = Gearbox(tiny_model("gpt_neox"), "4,16")
        how = {"gearbox": other, "mode": Kickdown((1.0,)), "input_embeddings": mx.zeros((4, 64))}
        with pytest.raises(GearbxError, match="takes no input_embeddings"):
            stream_generate(other.model, endless(), [], 9, **how)
