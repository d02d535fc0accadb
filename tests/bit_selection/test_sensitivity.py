"""Layers reduced one at a time: what is not computed again, what is measured, and what a killed run leaves."""

import json

import mlx.core as mx
import numpy as np
import pytest
from conftest import ARCHITECTURES, VOCABULARY, save_model, tiny_model
from refusals import assert_refused

from gearbx_mlx import Gearbox
from gearbx_mlx.bit_selection.sensitivity import Cost, ExactSensitivity, first_order


def windows(count: int = 2, length: int = 12) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length + i).tolist() for i in range(count)]


def exact_of(model, format: str = "affine", **change) -> ExactSensitivity:
    return ExactSensitivity(Gearbox(model, "3,8,16", format=format, **change), windows())


class TestExact:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_reused_values_match_recomputation(self, architecture):
        exact = exact_of(tiny_model(architecture))
        for layer in exact.in_order():
            assert exact.measure(layer, 3) == exact.measure_caps({layer.path: 3}), layer.path
        assert sum(exact.measure(layer, 3).kl > 0 for layer in exact.in_order()) > len(exact.layers) / 2

    def test_tied_head_is_separate_layer(self):
        exact = exact_of(tiny_model(tie_word_embeddings=True))
        head = exact.in_order()[-1]
        assert head.path == "model.embed_tokens"
        before = exact.cost.calls
        assert exact.measure(head, 3) == exact.measure_caps({head.path: 3})
        assert exact.cost.calls - before == 2  # windows: only the head is computed

    def test_counts_computed_passes(self):
        exact = exact_of(tiny_model())
        by_path = exact.layers
        exact.measure(by_path["model.layers.1.mlp.down_proj"], 3)
        recorded = 2 * 7  # windows and layers of the block, once
        assert exact.cost.calls == recorded + 2 * 2  # itself and the head
        exact.measure(by_path["model.layers.1.self_attn.v_proj"], 3)
        assert exact.cost.calls == recorded + 2 * 2 + 2 * (1 + 1 + 3 + 1)  # v, o, the MLP, the head

    def test_kl_and_perplexity_match_definitions(self):
        exact = exact_of(tiny_model())
        layer = exact.layers["lm_head"]
        logits = {}
        for bits in (16, 3):
            exact.gearbox.cap({layer.path: bits})
            outputs = (exact.gearbox.model(mx.array([window[:-1]]))[0] for window in windows())
            logits[bits] = [np.array(output).astype(np.float64) for output in outputs]
        exact.gearbox.cap({})
        kl, nll, reference = [], [], []
        for full, low, window in zip(logits[16], logits[3], windows()):
            p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (full, low))
            kl += (np.exp(p) * (p - q)).sum(-1).tolist()
            nll += [-q[i, token] for i, token in enumerate(window[1:])]
            reference += [-p[i, token] for i, token in enumerate(window[1:])]
        found = exact.measure(layer, 3)
        assert found.kl == pytest.approx(np.mean(kl), rel=1e-4)
        change = 100 * (np.exp(np.mean(nll)) / np.exp(np.mean(reference)) - 1)
        assert found.perplexity_change == pytest.approx(change, rel=1e-4)
        assert exact.perplexity == pytest.approx(np.exp(np.mean(reference)), rel=1e-5)

    def test_model_is_unchanged(self):
        model = tiny_model()
        exact = exact_of(model)
        kinds = {path: type(module) for path, module in model.named_modules()}
        before = model(mx.array([windows()[0]]))
        exact.measure(exact.in_order()[3], 3)
        assert {path: type(module) for path, module in model.named_modules()} == kinds
        assert mx.array_equal(model(mx.array([windows()[0]])), before).item()


def test_fast_method_matches_mlx_lm_and_leaves_model():
    model = tiny_model(dtype=mx.bfloat16)
    found = first_order(model, windows(), 4, 5, 64)
    assert found.keys() >= {"lm_head", "model.layers.0.mlp.up_proj"}
    assert all(np.isfinite(value) for value in found.values())
    assert model.lm_head.weight.dtype == mx.bfloat16


SMALL = ("--num-samples", 2, "--sequence-length", 24, "--bits", "4,5,8", "--manage", "attention")


@pytest.mark.slow
def test_the_command_writes_a_manifest(succeeds, tmp_path):
    out = tmp_path / "m.json"
    result = succeeds("sensitivity", *SMALL, "--out", out)
    assert result.out.split() == [str(out)]
    content = json.loads(out.read_text())
    assert len(content["layers"]) == 24
    assert all(list(layer["kl"]) == ["4", "5", "8"] for layer in content["layers"].values())
    assert "of the multiplications of 24 x 3 full passes" in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"m.json"}


@pytest.mark.parametrize("how", [[], ["--fast"]])
def test_bits_below_router_floor_are_refused(command, tmp_path, how):
    save_model(tiny_model("qwen3_moe", vocab_size=4096), tmp_path / "mixture")
    flags = ["--model", tmp_path / "mixture", "--bits", "3,4", "--num-samples", 1, "--sequence-length", 8, *how]
    words = "--bits 3,4: model.layers.0.mlp.gate has 8 bits or more; use 8 as well"
    assert_refused(command("sensitivity", *flags, "--out", tmp_path / "m.json"), words)
    assert {path.name for path in tmp_path.iterdir()} == {"mixture"}


def test_computed_share_counts_full_passes():
    cost = Cost(blocks=1.5, calls=2, multiplications=30, full_blocks=3, full_calls=8, full_multiplications=40)
    assert cost.shares() == {"blocks": 0.5, "layer_calls": 0.25, "multiplications": 0.75}
