"""evaluate --kv-gears: the loss of the KV cache's gears along a text."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import save_model, tiny_model
from mlx_lm.models.cache import KVCache
from refusals import assert_refused
from test_evaluate import HELD_OUT, evaluate

from gearbx_mlx import Gearbox
from gearbx_mlx.decoding.caches import cache_in_gears
from gearbx_mlx.evaluate import evaluate as run_evaluation
from gearbx_mlx.evaluation.predictions import StaticPolicy, driven
from gearbx_mlx.formats.kv_cache import group_for, pack, unpack

pytestmark = pytest.mark.slow

WINDOWS = [[int(token) for token in np.random.default_rng(4).integers(0, 64, 40)]]


class Rounded(KVCache):
    """mlx-lm's cache, in which each vector is replaced by what its planes stand for in a gear."""

    bits_read = 4

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        return super().update_and_fetch(*map(self.rounded, (keys, values)))

    def rounded(self, vectors: mx.array) -> mx.array:
        planes, scales, offsets = pack(vectors, (4, 4), group_for(vectors.shape[-1]))
        return unpack(planes, scales, offsets, (4, 4), self.bits_read)


@pytest.mark.slow
def test_each_gear_below_16_has_a_row_and_fewer_bits_lose_more(tmp_path):
    report = run_evaluation(HELD_OUT, out=tmp_path, tokens=120, gears="8,16", modes=["none"], kv_gears="4,8")
    rows = {row["name"]: row for row in report["rows"]}
    assert [*rows] == ["8 bits", "16 bits", "16 bits, KV 4", "16 bits, KV 8"]
    four, eight, top = rows["16 bits, KV 4"], rows["16 bits, KV 8"], rows["16 bits"]
    assert 0 < eight["kl_mean"] < four["kl_mean"] / 20
    assert eight["top1_agreement"] > 0.97
    assert four["weight_bytes_per_token"] == top["weight_bytes_per_token"]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_gear_predicts_as_over_rounded_keys_and_values(bits):
    gearbox = Gearbox(tiny_model(), "4,16", kernels="mlx")

    def predictions(begun) -> np.ndarray:
        steps = driven(gearbox, WINDOWS, StaticPolicy(gearbox.ladder.top), begun)
        return np.array([step.logprobs for step in steps])

    def rounded(_window: int) -> list[KVCache]:
        caches = [Rounded() for _ in gearbox.model.layers]
        for cache in caches:
            cache.bits_read = bits
        return caches

    in_gear = predictions(lambda _: cache_in_gears(gearbox.model, gearbox, "4,8", fixed=bits))
    np.testing.assert_allclose(in_gear, predictions(rounded), atol=1e-5)
    assert np.abs(in_gear - predictions(lambda _: [KVCache() for _ in gearbox.model.layers])).max() > 1e-4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-gears", "8,4"], ["--kv-gears is 8,4", "ascending"]),
        (["--kv-gears", "2,16"], ["--kv-gears is 2,16"]),
        (["--kv-gears", "16"], ["--kv-gears is 16", "add a lower gear"]),
    ],
)
def test_flags_that_do_not_fit_are_refused(command, tmp_path, flags, words):
    assert_refused(evaluate(command, tmp_path / "out", *flags), *words, folder=tmp_path)


def test_a_model_whose_cache_has_no_gears_is_refused(command, tmp_path):
    save_model(tiny_model("mamba"), tmp_path / "model")
    done = evaluate(command, tmp_path / "out", "--model", tmp_path / "model", "--kv-gears", "4,8", "--context", 16)
    assert_refused(done, "--kv-gears is 4,8", "has no gears")
