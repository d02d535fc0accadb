import itertools
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from conftest import KEYWORDS, Script, assert_same_text, written
from refusals import refuses

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, Monitor, Route, Static, ThresholdGate, entropy_bits
from gearbx_mlx.decoding.stream import stream_generate
from gearbx_mlx.routing.gates import replay

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:"
TALE = "Once upon a time there was a king who"


def told(demo, gearbox, tokens, mode):
    """The responses of so many tokens after the tale."""
    return list(stream_generate(demo.model, demo.tokenizer, TALE, tokens, gearbox=gearbox, mode=mode))


class TestHeldGear:
    @pytest.mark.slow
    @pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
    def test_tokens_and_logprobs_are_mlx_lms_own(self, demo, keywords):
        keywords = {"max_tokens": 40} | keywords
        mx.random.seed(3)
        theirs = written(mlx_lm.stream_generate(demo.model, demo.tokenizer, QUESTION, **keywords))
        gearbox = Gearbox(demo.model, "16")
        mx.random.seed(3)
        ours = written(stream_generate(demo.model, demo.tokenizer, QUESTION, gearbox=gearbox, **keywords))
        assert_same_text(ours, theirs)

    def test_low_gear_equals_mlx_lm_quantized(self, fresh_demo, demo):
        fresh_demo.model.set_dtype(mx.float32)
        nn.quantize(fresh_demo.model, 64, 4, class_predicate=lambda path, m: isinstance(m, nn.Linear))
        theirs = written(mlx_lm.stream_generate(fresh_demo.model, demo.tokenizer, TALE, 20))
        other, _ = gearbx_mlx.load()
        other.set_dtype(mx.float32)
        gearbox = Gearbox(other, "4,16", format="affine", manage=lambda _, m: isinstance(m, nn.Linear), kernels="mlx")
        how = {"gearbox": gearbox, "mode": Static("low", prompt_gear="same")}
        assert_same_text(written(stream_generate(other, demo.tokenizer, TALE, 20, **how)), theirs)


class TestRouting:
    @pytest.mark.slow
    def test_a_shift_acts_two_tokens_later(self, fresh_demo):
        script = [0, 1, 2, 2, 0, 0, 1, 1, 1, 0]
        gearbox = Gearbox(fresh_demo.model, "4,8,16")
        responses = told(fresh_demo, gearbox, 10, Route(gate=Script(script), initial_gear="high"))
        names = ["low", "mid", "high"]
        assert [r.gear for r in responses] == ["high", "high", *(names[gear] for gear in script[:8])]
        gears = [r.gear for r in responses]
        assert [r.shifted for r in responses] == [False, *(a != b for a, b in itertools.pairwise(gears))]

    @pytest.mark.slow
    def test_token_is_computed_by_named_gear(self, fresh_demo):
        model, gate = fresh_demo.model, Script([1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0])
        gearbox = Gearbox(model, "4,16")
        responses = told(fresh_demo, gearbox, 12, Route(initial_gear="low", gate=gate, prompt_gear="same"))
        cache = mlx_lm.models.cache.make_prompt_cache(model)
        gearbox.shift("low")
        prompt = fresh_demo.tokenizer.encode(TALE)
        model(mx.array(prompt[:-1])[None], cache=cache)
        last = prompt[-1]
        for response in responses:
            gearbox.shift(response.gear)
            logits = model(mx.array([[last]]), cache=cache)[0, -1]
            assert np.allclose(np.array(logits - mx.logsumexp(logits)), np.array(response.logprobs), atol=1e-4)
            last = response.token

    @pytest.mark.slow
    def test_entropies_and_gears_match_gate(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, kernels="mlx")
        thresholds = (1.0, 2.0)
        responses = told(fresh_demo, gearbox, 60, Route(thresholds, initial_gear="low", min_gear_duration=2))
        for i, response in enumerate(responses):
            assert response.entropy == pytest.approx(entropy_bits(response.logprobs).item(), abs=1e-6)
            window = [r.entropy for r in responses[max(0, i - 2) : i + 1]]
            assert response.mean_entropy == pytest.approx(sum(window) / len(window))
        chosen = replay([r.entropy for r in responses], Monitor(4096), ThresholdGate(thresholds, min_gear_duration=2))
        names = [gear.name for gear in gearbox.ladder]
        assert [r.gear for r in responses] == ["low", "low", *(names[g] for g in chosen[:-2])]
        assert len({r.gear for r in responses}) > 1

    def test_forecast_gear_is_made_in_advance(self, fresh_demo):
        class Foreseeing(Script):
            def peek(self, level):
                return 1

        gearbox = Gearbox(fresh_demo.model, "4,8,16", format="affine", kernels="mlx")
        told(fresh_demo, gearbox, 8, Route(gate=Foreseeing([0] * 8), initial_gear="low"))
        made = mx.get_active_memory()
        gearbox.shift("mid")
        assert gearbox.gear.name == "mid"
        assert mx.get_active_memory() == pytest.approx(made, abs=2e5)  # nothing was left to make


def test_telemetry_only_names_gears_of_routing(demo):
    observer = gearbx_mlx.Observer(demo.model, "4,8,16", dtype="bfloat16")
    responses = told(demo, observer, 40, gearbx_mlx.TelemetryOnly((1.0, 2.0), initial_gear="low"))
    chosen = replay([r.entropy for r in responses], Monitor(4096), ThresholdGate((1.0, 2.0)))
    assert [r.gear for r in responses] == ["low", "low", *(observer.ladder[g].name for g in chosen[:-2])]


class TestArguments:
    def test_existing_gearbox_of_model_is_reused(self, fresh_demo):
        model = fresh_demo.model
        low, high = (told(fresh_demo, None, 6, Route((11.0, 11.5), initial_gear=gear)) for gear in ("low", "high"))
        assert low[-1].gear == "low"
        assert high[0].gear == "high"
        assert isinstance(model.model.layers[0].mlp.up_proj, nn.QuantizedLinear)  # back to low after four tokens
        assert not np.array_equal(np.array(low[0].logprobs), np.array(high[0].logprobs))

    def test_generate_returns_output(self, fresh_demo, capsys):
        how = {"gearbox": Gearbox(fresh_demo.model, "16"), "max_tokens": 20, "verbose": True}
        text = gearbx_mlx.generate(fresh_demo.model, fresh_demo.tokenizer, TALE, **how)
        assert text == mlx_lm.generate(fresh_demo.model, fresh_demo.tokenizer, TALE, max_tokens=20)
        printed, _, figures = capsys.readouterr().out.partition("\nPrompt: ")
        assert printed == text
        prompt, generation, memory = figures.splitlines()
        assert prompt.startswith(f"{len(fresh_demo.tokenizer.encode(TALE))} tokens, ")
        assert generation.startswith("Generation: 20 tokens, ")
        assert memory.startswith("Peak memory: ")

    @pytest.mark.parametrize("mode", ["static", "lossless"])
    @pytest.mark.parametrize(
        ("given", "remedy"),
        [
            ({"temp": 0.5}, "use sampler=mlx_lm.sample_utils.make_sampler(temp=0.5)"),
            ({"max_token": 5}, "did you mean max_tokens?"),
            ({"nothing_like_it": 1}, "choose from"),
        ],
    )
    def test_an_unknown_keyword_is_refused_at_once(self, demo, mode, given, remedy):
        with refuses(f"stream_generate: has no keyword '{next(iter(given))}'", remedy):
            gearbx_mlx.stream_generate(demo.model, demo.tokenizer, TALE, mode=mode, **given)

    @pytest.mark.parametrize("mode", ["static", "lossless"])
    @pytest.mark.parametrize(("name", "value"), [("prefill_step_size", 0), ("num_draft_tokens", 0), ("max_kv_size", 4)])
    def test_too_small_number_is_refused_at_once(self, demo, mode, name, value):
        with pytest.raises(GearbxError, match=f"{name}: must be [15] or more, got {value}"):
            gearbx_mlx.stream_generate(demo.model, demo.tokenizer, TALE, mode=mode, **{name: value})

    @pytest.mark.parametrize("mode", ["static", "lossless"])
    def test_token_of_text_beyond_vocabulary_is_refused(self, demo, mode):
        class Larger(type(demo.tokenizer)):
            def encode(self, *_, **__):
                return [5, 4100]

        tokenizer = Larger(demo.tokenizer._tokenizer)
        with pytest.raises(GearbxError, match="prompt: tokens must be 0 to 4095, got 4100"):
            gearbx_mlx.stream_generate(demo.model, tokenizer, TALE, mode=mode)

    @pytest.mark.parametrize("mode", ["static", "lossless", "kickdown"])
    def test_stream_of_the_caller(self, demo, mode):
        own = mx.new_stream(mx.default_device())
        plain, streamed = (
            [one.token for one in stream_generate(demo.model, demo.tokenizer, TALE, 8, mode=mode, **how)]
            for how in ({}, {"stream": own})
        )
        assert plain == streamed

    def test_sequences_with_one_gate_take_turns(self, fresh_demo):
        mode = Route(gate=ThresholdGate([1.0, 2.5]))
        gearbox = Gearbox(fresh_demo.model, "4,8,16")
        alone = [one.gear for one in told(fresh_demo, gearbox, 20, mode)]
        how = {"gearbox": gearbox, "mode": mode}
        first, second = (stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, 20, **how) for _ in range(2))
        assert [one.gear for pair in zip(first, second) for one in pair] == [gear for gear in alone for _ in range(2)]

    def test_summary_counts_shifts_of_its_run(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, "4,16")
        gearbox.shift_seconds = 100.0
        responses = stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, 5, gearbox=gearbox, mode="route")
        list(responses)
        assert responses.summary()["shift_seconds"] < 50

    def test_embeddings_without_tokens_have_a_summary(self, tiny, demo):
        embedded = tiny.model.embed_tokens(mx.array([1, 5, 9]))
        how = {"input_embeddings": embedded, "mode": "static", "gearbox": Gearbox(tiny, "4,16")}
        responses = stream_generate(tiny, demo.tokenizer, mx.array([], mx.int32), 4, **how)
        assert responses.summary()["tokens"] == 0
        list(responses)
        assert responses.summary()["tokens"] == 4

    def test_load_keeps_argument_order_of_mlx_lm(self):
        arguments = (gearbx_mlx.loading.DEMO_MODEL, {"padding_side": "left"}, {"rope_theta": 5000.0}, None, True, True)
        model, tokenizer, config = gearbx_mlx.load(*arguments)
        assert (tokenizer.padding_side, model.args.rope_theta, config["rope_theta"]) == ("left", 5000.0, 5000.0)

    @pytest.mark.some(5)
    @pytest.mark.parametrize(
        ("mode", "complaint"),
        [
            ("overdrive", "mode: unknown, got overdrive; choose from route"),
            ("telemetry-only", "shifts no gears"),
            (Route((3.0, 1.0)), "ascend"),
            (Route((3.0,)), "3 gears need 2 thresholds"),
            (Route(initial_gear="reverse"), "no gear 'reverse'"),
            (partial(Route, window=0), "window: out of range, got 0"),
            (partial(Route, window=2.5), "window: must be a whole number, got 2.5"),
            (Route(3.0), "thresholds: must be a list of bits, got 3.0"),
            (partial(Route, hysteresis=float("nan")), "hysteresis"),
            (partial(Route, min_gear_duration=0), "duration"),
            (Static("reverse"), "no gear 'reverse'"),
            ("pair", "mode 'pair': needs a small model"),
        ],
    )
    def test_invalid_arguments_are_refused_before_running(self, fresh_demo, mode, complaint):
        gearbox = Gearbox(fresh_demo.model)

        def begin():
            chosen = mode() if callable(mode) else mode
            return stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, gearbox=gearbox, mode=chosen)

        with pytest.raises(GearbxError, match=complaint):
            begin()
        assert gearbox.gear.name == "high"

    def test_gearbox_of_other_model_is_refused(self, fresh_demo, tiny):
        with pytest.raises(GearbxError, match="a different model"):
            stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, gearbox=Gearbox(tiny))
