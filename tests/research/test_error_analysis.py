"""Where low gears err (GEARBX 13): numpy computes every figure again."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import heavy, tiny_model

from gearbx_mlx import Gearbox
from research import attention
from research import errors as analysis
from research.attention import PARTS, attention_errors

TOKENS = [(7 * i + i * i) % 50 for i in range(40)]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def symmetric(weight: np.ndarray, q_max: int) -> tuple[np.ndarray, np.ndarray]:
    """The formulas of GEARBX 5.1, row by row: a gear's weights, and the scales."""
    scales = np.abs(weight).max(axis=1) / np.float32(q_max)
    rows = [np.clip(np.round(row / s), -q_max, q_max) * s for row, s in zip(weight, scales)]
    return np.stack(rows), scales


def linears(block: nn.Module) -> list[np.ndarray]:
    return [np.array(m.weight) for m in block.modules() if isinstance(m, nn.Linear)]


def test_layer_error_covers_all_its_weights(model):
    rows = {(row["layer"], row["bits"]): row for row in analysis.layer_errors(model)}
    assert len(rows) == 4 * len(model.layers)
    for number, block in enumerate(model.layers):
        for bits, q_max in ((8, 127), (6, 31), (4, 7), (2, 1)):
            found = [(weight, *symmetric(weight, q_max)) for weight in linears(block)]
            errors = np.concatenate([(quantized - weight).reshape(-1) for weight, quantized, _ in found])
            scales = np.concatenate([np.repeat(s, weight.shape[1]) for weight, _, s in found])
            row = rows[number, bits]
            assert row["mse"] == pytest.approx(np.square(errors, dtype=np.float64).mean(), rel=1e-4)
            assert row["estimate"] == pytest.approx(np.square(scales, dtype=np.float64).mean() / 12, rel=1e-4)
            assert row["quotient"] == pytest.approx(row["mse"] / row["estimate"])
            assert row["ratio"] == pytest.approx(row["mse"] / rows[number, 8]["mse"])


def test_double_quantization_error_parts_add_up():
    weight = heavy(32, 256)
    parts = analysis.twice(weight, analysis.by_groups(4), analysis.by_rows(4))
    exact = np.array(weight)
    first = np.array(mx.dequantize(*mx.quantize(weight, 64, 4), 64, 4))
    second = symmetric(first, 7)[0]
    a, b = (first - exact).astype(np.float64), (second - first).astype(np.float64)
    expected = {"original": (a**2).mean(), "second": (b**2).mean(), "cross": 2 * (a * b).mean()}
    expected |= {"total": ((second - exact) ** 2).mean(), "once": ((symmetric(exact, 7)[0] - exact) ** 2).mean()}
    for name, value in expected.items():
        assert parts[name] == pytest.approx(value, rel=1e-3, abs=1e-9), name
    assert parts["original"] + parts["second"] + parts["cross"] == pytest.approx(parts["total"], rel=1e-4)


@pytest.mark.parametrize("architecture", [None, "qwen3", "phi3", "gpt_neox", "gemma3_text"])
def test_head_contributions_sum_to_attention_output(architecture, model):
    model = tiny_model(architecture) if architecture else model
    with attention.watched(model) as noted:
        model(mx.array([TOKENS]))
    assert len(noted) == len(model.layers)
    for call in noted:
        heads = call.attended.queries.shape[1]
        out = attention.by_head(call.output, heads)
        added = call.attended.probabilities() @ call.attended.spread_values() @ out
        assert added.shape[0] == heads
        expected = np.array(call.module(*call.arguments, **call.keywords)[0]) - np.array(call.output.get("bias", 0.0))
        np.testing.assert_allclose(np.array(added.sum(axis=0)), expected, atol=1e-5 * np.abs(expected).max() + 1e-7)
        np.testing.assert_allclose(np.array(call.attended.probabilities().sum(axis=-1)), 1, atol=1e-5)


def test_projection_error_equals_its_output_error(model):
    rows = attention_errors(model, [TOKENS], lambda weight: 1.1 * weight, first=0)
    by_part = {part: [row for row in rows if row["part"] == part and row["samples"]] for part in PARTS}
    for part in ("V", "output"):  # outputs are linear in both: a tenth more
        found = by_part[part]
        assert [row["error"] for row in found] == pytest.approx([0.01] * len(found), rel=1e-3)
        shared = np.average([row["shared"] for row in found], weights=[row["samples"] for row in found])
        assert shared == pytest.approx(0.01, rel=1e-3)
    heads = model.layers[0].self_attn.n_heads
    assert sum(row["samples"] for row in by_part["Q and K"]) == heads * len(model.layers) * len(TOKENS)


KINDS = ("deepseek_v3", "gemma3", "gpt_oss", "qwen3_next", "lfm2", "mixtral", "cohere2", "olmo2")


@pytest.mark.parametrize("architecture", KINDS)
def test_every_kind_of_attention_is_analysed(architecture):
    model = tiny_model(architecture)
    rows = attention_errors(model, [TOKENS], first=4)
    counted = {part: sum(row["samples"] for row in rows if row["part"] == part) for part in PARTS}
    assert counted["Q and K"] == counted["V"] > 0
    errors = [row["error"] for row in rows if row["samples"]]
    assert all(0 < error < 1 for error in errors)
    low, high = (gearbox := Gearbox(model, "4,16", kernels="mlx")).ladder
    for row in analysis.kv_errors(gearbox, [TOKENS], [low, high], [8]):
        assert row["kl"] > 0
        assert 0 <= row.get("keys", 0) < 1  # window caches that the text overruns do not keep the whole text
