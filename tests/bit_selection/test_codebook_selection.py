from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import heavy, layer_with, tiny_model
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from refusals import assert_refused

from gearbx_mlx import GearbxError
from gearbx_mlx.bit_selection import Floors
from gearbx_mlx.bit_selection import codebook_selection as report
from gearbx_mlx.bit_selection.codebook_selection import LayerQualities, Quality, qualities, select, some_experts
from gearbx_mlx.bit_selection.h_process import (
    CheckResult,
    GarbageCheck,
    Limits,
    encoding_spike,
    loops,
    measure_reserve,
    operating_points,
    search,
)
from gearbx_mlx.convert import BudgetSettings
from gearbx_mlx.formats import codebook, get_format
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.settings import parse_bytes


def cosine(made: mx.array, weight: mx.array) -> float:
    norms = mx.linalg.norm(made, axis=-1) * mx.linalg.norm(weight, axis=-1)
    return float(np.median(np.array((made * weight).sum(-1) / norms)))


def layer(path: str, kind: str, cosines: dict[int, float], weights: int = 1000) -> LayerQualities:
    found = [Quality(bits, c, c - 0.01, 1 - c, 0.003, bits + 0.5) for bits, c in cosines.items()]
    return LayerQualities(path, kind, weights, 0, tuple(found))


LAYERS = [
    layer("a.q_proj", "attention", {2: 0.94, 3: 0.985, 4: 0.996}),
    layer("a.experts", "routed", {2: 0.935, 3: 0.983, 4: 0.995}, 8000),
]


class TestQuality:
    @pytest.mark.parametrize("name", ["codebook", "codebook-library"])
    def test_quality_matches_reconstruction(self, name):
        weight, format = heavy(48, 384), get_format(name)
        for quality in qualities(format, weight):
            module = format.modules(layer_with(weight), quality.bits, (quality.bits,), 64, mx.float32)[quality.bits]
            made = module.dense_weight(mx.float32)
            assert quality.cosine == pytest.approx(cosine(made, weight), abs=2e-5)
            off = (mx.square(made - weight).sum() / mx.square(weight).sum()).item()
            assert quality.error == pytest.approx(off, rel=1e-2, abs=1e-5)
            assert quality.effective_bits == pytest.approx(8 * module.bytes_read / weight.size, abs=1e-3)
            assert quality.bulk_cosine < quality.cosine

    def test_without_outliers_is_a_codebook_of_all_weights(self):
        weight = heavy(48, 384)
        entries, codes = codebook.fit(weight, mx.zeros(weight.shape, mx.bool_), 3)
        made = mx.take_along_axis(entries.astype(mx.float32), codes.astype(mx.uint32), axis=-1)
        found = {quality.bits: quality for quality in qualities(get_format("codebook"), weight)}
        assert found[3].bulk_cosine == pytest.approx(cosine(made, weight), abs=2e-5)

    def test_a_sample_of_channels_is_near_all(self, monkeypatch):
        weight = heavy(2048, 256)
        every = next(qualities(get_format("codebook"), weight))
        monkeypatch.setattr("gearbx_mlx.bit_selection.codebook_selection.WEIGHTS_JUDGED", 512 * 256)
        assert next(qualities(get_format("codebook"), weight)).cosine == pytest.approx(every.cosine, abs=1e-3)

    def test_four_experts_are_judged(self):
        experts = heavy(32, 8, 64)
        assert mx.array_equal(some_experts(experts), experts[mx.array([0, 8, 16, 24])]).item()
        assert some_experts(experts[:3]).shape == (3, 8, 64)
        spoiled = mx.array(experts)
        spoiled[5] = 7.0
        assert next(qualities(get_format("codebook"), spoiled)) == next(qualities(get_format("codebook"), experts))


class TestSelection:
    def test_chooses_first_bits_above_floor(self):
        """Layers that no codebook brings to their floor stay as they are."""
        assert select(LAYERS, Floors(0.98, 0.93)).bits == {"a.q_proj": 3, "a.experts": 2}
        assert select(LAYERS, Floors(0.93, 0.93)).bits == {"a.q_proj": 2, "a.experts": 2}
        assert select(LAYERS, Floors(0.99, 0.94)).bits == {"a.q_proj": 4, "a.experts": 3}
        assert select(LAYERS, Floors(0.98, 0.93)).effective_bits == pytest.approx((3.5 * 1000 + 2.5 * 8000) / 9000)
        selection = select(LAYERS, Floors(0.999, 0.93))
        assert selection.bits["a.q_proj"] == 16
        assert selection.choices[0].effective_bits == 16

    def test_component_kind_follows_path_and_class(self):
        one = nn.Linear(4, 4)
        assert report.component_kind("model.layers.0.self_attn.q_proj", one) == "attention"
        assert report.component_kind("model.layers.0.mlp.up_proj", one) == "mlp"
        assert report.component_kind("model.layers.0.mlp.shared_expert.up_proj", one) == "shared"
        assert report.component_kind("model.layers.0.mlp.switch_mlp.up_proj", SwitchLinear(4, 4, 2)) == "routed"
        assert report.component_kind("lm_head", one) == "head"

    @pytest.mark.parametrize("floor", [0.0, 1.0, -0.5, 1.5, float("nan")])
    def test_floors_outside_0_and_1(self, floor):
        with pytest.raises(GearbxError, match=r"strict floor: must be between 0 and 1, got .*; use a cosine"):
            Floors(strict=floor)
        with pytest.raises(GearbxError, match="lazy floor: must be between"):
            Floors(lazy=floor)

    def test_environment_variables_set_the_floors(self, monkeypatch):
        monkeypatch.delenv("XFP_MIN_COS_STRICT", raising=False)
        monkeypatch.delenv("XFP_MIN_COS_LAZY", raising=False)
        assert Floors.chosen() == Floors(0.98, 0.93)
        monkeypatch.setenv("XFP_MIN_COS_STRICT", "0.97")
        monkeypatch.setenv("XFP_MIN_COS_LAZY", "0.9")
        assert Floors.chosen() == Floors(0.97, 0.9)
        assert Floors.chosen(strict=0.99) == Floors(0.99, 0.9)
        for text in ("much", "1", "nan"):
            monkeypatch.setenv("XFP_MIN_COS_LAZY", text)
            with pytest.raises(
                GearbxError,
                match=f"XFP_MIN_COS_LAZY: must be between 0 and 1, got '?{text}'?; use a cosine",
            ):
                Floors.chosen()


class TestReport:
    def test_the_form_of_table_3(self):
        rows = report.class_rows(select(LAYERS, Floors(0.98, 0.93)))
        assert [(r["component"], r["layers"], r["selected"], r["effective_bits"]) for r in rows[:2]] == [
            ("attention", 1, "1×xfp3", 3.5),
            ("routed", 1, "1×xfp2", 2.5),
        ]
        assert (rows[2]["component"], rows[2]["selected"]) == ("total", "1×xfp2, 1×xfp3")
        assert "1×dense" in report.class_rows(select(LAYERS, Floors(0.999, 0.93)))[0]["selected"]
        assert [row["bits"] for row in report.layer_rows(select(LAYERS, Floors(0.98, 0.93)))] == [3, 2]


def says(kl: float, reason: str = "") -> CheckResult:
    return CheckResult(kl, 0, reason)


class TestHProcess:
    GRID = [(0.93, 0.93), (0.98, 0.93), (0.98, 0.94), (0.99, 0.94)]

    def points(self, **change):
        return operating_points(LAYERS, **({"unmanaged": 100, "spike": 500, "grid": self.GRID} | change))

    def test_points_ascend_and_differ(self):
        points = self.points()
        assert [tuple(p.selection.bits.values()) for p in points] == [(2, 2), (3, 2), (3, 3), (4, 3)]
        assert [p.steady for p in points] == [p.selection.bytes + 100 for p in points]
        assert all(p.spike == p.steady + 500 for p in points)
        assert len(self.points(most=2)) == 2
        assert len(self.points(grid=[(0.98, 0.93), (0.981, 0.931), (0.9, 0.95)])) == 1

    def test_most_conservative_valid_point_is_chosen(self):
        points = self.points()
        budget = points[2].spike
        found = search(points, lambda selection: says(0.1), Limits(memory_budget=budget))
        assert found.best.selection is points[2].selection
        assert [p.outcome for p in found.tried] == ["fits", "fits", "fits", "over budget"]
        assert found.tried[3].verdict is None  # what does not fit is not made
        rows = [p.row for p in found.tried]
        assert [row["kl"] for row in rows] == [0.1, 0.1, 0.1, None]
        assert rows[0]["strict"] == 0.93

    def test_garbage_is_never_returned(self):
        points = self.points()

        def judge(selection):
            bad = selection.bits["a.q_proj"] == 2
            return says(9.0 if bad else 0.2, "KL 9 above 0.5" if bad else "")

        found = search(points, judge, Limits(target_bpw=2.7))
        assert [p.outcome for p in found.tried] == ["KL 9 above 0.5", "fits", "over budget"]
        assert found.best.selection is points[1].selection
        with pytest.raises(
            GearbxError, match=r"generates garbage; the closest has floors 0\.93 and 0\.93.*use a larger"
        ):
            search(points, judge, Limits(memory_budget=points[0].spike))

    def test_reserve_above_encoding_memory_counts(self):
        points = self.points()
        assert [p.needed for p in self.points(reserve=400)] == [p.spike for p in points]
        reserved = self.points(reserve=700)
        assert [p.needed for p in reserved] == [p.steady + 700 for p in points]
        found = search(reserved, lambda selection: says(0.1), Limits(memory_budget=points[2].steady + 700))
        assert found.best.selection == points[2].selection
        assert found.best.row["reserve"] == 700
        with pytest.raises(GearbxError, match="no point meets the budget"):
            search(reserved, lambda selection: says(0.1), Limits(memory_budget=points[0].spike))

    def test_reserve_is_cache_size_of_context(self):
        model = tiny_model(max_position_embeddings=3000)
        reserve = measure_reserve(model)
        caches = make_prompt_cache(model)
        model(mx.zeros((1, 3000), mx.int32), cache=caches)
        assert reserve.tokens == 3000
        assert reserve.cache == sum(a.nbytes for cache in caches for a in cache.state if isinstance(a, mx.array))
        assert reserve.bytes == reserve.cache + reserve.activations > reserve.cache
        assert measure_reserve(tiny_model(max_position_embeddings=10**6)).tokens == 8192

    def test_unreachable_budget_is_refused(self):
        with pytest.raises(GearbxError, match=r"no point meets the budget; the smallest has floors 0\.93 and 0\.93"):
            search(self.points(), lambda selection: says(0.0), Limits(memory_budget=10))

    def test_the_spike_of_encoding_covers_the_largest_layer(self):
        model = tiny_model()
        layers, _ = discover(model, format=get_format("codebook"))
        spike = encoding_spike(layers, get_format("codebook"), 4)
        assert spike > 2 * max(e.module.weight.nbytes for e in layers)


class TestGarbage:
    def test_loops_are_found_by_repetition(self):
        assert loops([1, 2, 3] + [7] * 16)
        assert loops([5, 6] * 8)
        assert loops([*range(30), *[1, 2, 3, 4, 5, 6, 7, 8] * 4])
        assert not loops([7] * 15)
        assert not loops([*range(8)] * 3)
        assert not loops([1, 2] * 7 + [3, 1])
        assert not loops([])

    def test_the_original_passes_and_noise_does_not(self, fresh_demo):
        model = fresh_demo.model
        text = fresh_demo.tokenizer.encode("Question: How much is 3 plus 4?\nAnswer: 3+4=<<3+4=7>>7")
        check = GarbageCheck(model, [text], written=4)
        assert check(model) == CheckResult(0.0, 0, "")
        for block in model.layers:
            block.mlp.down_proj.weight = mx.random.normal(block.mlp.down_proj.weight.shape)
        sense = check(model)
        assert not sense.passed
        assert sense.reason.startswith("KL ")

    def test_repetition_absent_from_original(self, monkeypatch):
        model = tiny_model()
        check = GarbageCheck(model, [[1, 2, 3, 4]], kl_bound=1e9, written=16)
        monkeypatch.setattr("gearbx_mlx.bit_selection.h_process.continuation", lambda *args: [5] * 16)
        sense = check(model)
        assert sense.looped == (0 if check._loops[0] else 1)
        check._loops = [True]
        assert check(model).passed  # the original does it too

    def test_too_short_texts_are_refused(self):
        with pytest.raises(GearbxError, match="no calibration text has two tokens or more"):
            GarbageCheck(SimpleNamespace(), [[1]])


class TestFitting:
    @pytest.mark.parametrize(
        ("text", "count"),
        [("3GB", 3e9), ("3 gb", 3e9), ("1.5GiB", 1.5 * 2**30), ("500M", 5e8), ("1e9", 1e9), ("12kb", 12e3)],
    )
    def test_sizes_are_parsed_to_bytes(self, text, count):
        assert parse_bytes(text, "--size") == count

    @pytest.mark.parametrize("text", ["", "much", "-3GB", "0", "3XB", "GB", "1.2.3GB"])
    def test_invalid_size_is_refused(self, text):
        with pytest.raises(GearbxError, match=r"--size: not a size, got .*; use bytes such as 3GB"):
            parse_bytes(text, "--size")


class TestFlags:
    @pytest.mark.parametrize(("text", "count"), [("20%", 600), ("1kB", 1000), ("0", 0), (None, None)])
    def test_reserve_is_parsed_to_bytes(self, text, count):
        assert BudgetSettings(memory_budget="3kB", reserve=text).reserved() == count

    @pytest.mark.parametrize(
        ("text", "budget", "words"),
        [
            ("3kB", "3kB", "--reserve: must be less than --memory-budget, got 3kB"),
            ("100%", "3kB", "--reserve: must be less than --memory-budget, got 100%"),
            ("-1%", "3kB", "not a size, got '-1%'"),
            ("1kB", None, "--reserve: needs --memory-budget, got only 1kB; set both"),
        ],
    )
    def test_missing_reserve_is_refused(self, text, budget, words):
        with pytest.raises(GearbxError, match=words):
            BudgetSettings(memory_budget=budget, reserve=text)

    def test_missing_floors_are_refused(self, command, tmp_path):
        flags = "--mlx-path", tmp_path / "out", "--auto-bits"
        done = command("convert", "--format", "codebook", "--gears", "2,16", *flags, "0.98,1.2")
        assert_refused(done, "lazy floor: must be between 0 and 1, got 1.2; use a cosine")
        assert_refused(command("convert", *flags), "got format planes; use --format codebook")
