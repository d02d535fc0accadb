"""Bits for every layer: greedy by KL saved per byte, then measured."""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest
from conftest import VOCABULARY, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.allocation import (
    Allocator,
    Option,
    greedy_path,
    least_bytes,
    lower_hull,
    moves,
    within_bytes,
)
from gearbx_mlx.bit_selection.precision import LayerPrecision, PrecisionManifest, read_precision
from gearbx_mlx.bit_selection.sensitivity import ExactSensitivity, layer_precisions
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.gears.gearbox import model_fingerprint

BITS = (3, 4, 8)


def options(*rows: tuple[int, int, float]) -> list[Option]:
    return [Option(*row) for row in rows]


LAYERS = {  # all of one size; b gains most from its first step, a from a later one
    "a": options((3, 30, 1.0), (4, 40, 0.95), (8, 80, 0.0)),
    "b": options((3, 30, 4.0), (4, 40, 1.0), (8, 80, 0.5)),
}


@st.composite
def some_layers(draw):
    layers = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        kls = sorted(draw(st.lists(st.floats(0, 10), min_size=3, max_size=3)), reverse=True)
        size = draw(st.integers(1, 5))
        layers[name] = [Option(bits, bits * size, kl) for bits, kl in zip(BITS, kls)]
    return layers


class TestGreedy:
    def test_skips_widths_that_save_little(self):
        assert [option.bits for option in lower_hull(LAYERS["a"])] == [3, 8]
        assert [option.bits for option in lower_hull(LAYERS["b"])] == [3, 4, 8]

    def test_path_starts_with_steepest_step(self):
        points = greedy_path(LAYERS)
        assert [(point.table["a"], point.table["b"]) for point in points] == [(3, 3), (3, 4), (8, 4), (8, 8)]
        assert [point.bytes for point in points] == [60, 70, 120, 160]
        assert [point.kl for point in points] == pytest.approx([5.0, 2.0, 1.0, 0.5])

    def test_remaining_budget_is_used(self):
        found = within_bytes(LAYERS, 80)
        assert (found.table, found.bytes, found.kl) == ({"a": 4, "b": 4}, 80, pytest.approx(1.95))

    @given(some_layers(), st.floats(0, 1))
    def test_is_within_the_budget_and_near_the_best(self, layers, share):
        least, most = (sum(side(o.bytes for o in row) for row in layers.values()) for side in (min, max))
        budget = least + share * (most - least)
        found = within_bytes(layers, budget)
        assert found.bytes <= budget + 1e-6
        assert found.bytes == sum(next(o.bytes for o in layers[n] if o.bits == b) for n, b in found.table.items())
        best = min(
            sum(option.kl for option in chosen)
            for chosen in itertools.product(*layers.values())
            if sum(option.bytes for option in chosen) <= budget + 1e-6
        )
        # A sum on convex hulls is off by at most one step of one layer.
        step = max(row[0].kl - row[-1].kl for row in layers.values())
        assert best - 1e-9 <= found.kl <= best + step + 1e-9

    def test_least_bytes_by_bisection(self):
        points, asked = greedy_path(LAYERS), []

        def measured(table):
            asked.append(table)
            return {60: 6.0, 70: 2.5, 120: 1.1, 160: 0.6}[next(p.bytes for p in points if p.table == table)]

        assert least_bytes(points, measured, 1.2).bytes == 120
        assert len(asked) <= 3
        assert least_bytes(points, measured, 0.1) is None

    def test_moves_keep_the_budget(self):
        found = list(moves(LAYERS, {"a": 4, "b": 4}, room=0))
        assert found == []  # up costs 40 and down gives 10
        assert list(moves(LAYERS, {"a": 4, "b": 3}, room=0)) == [{"a": 3, "b": 4}]


def windows() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, VOCABULARY, 16).tolist() for _ in range(2)]


@pytest.fixture(scope="module")
def measured():
    """A random model whose layers differ in sensitivity, each measured alone."""
    model = tiny_model(dtype=mx.bfloat16)
    for place, block in enumerate(model.model.layers):
        block.mlp.down_proj.weight = block.mlp.down_proj.weight * (8 if place else 1)
    exact = ExactSensitivity(Gearbox(model, "3,4,8,16", format="affine"), windows())
    parts = {}
    for layer in exact.in_order():
        found = {str(bits): exact.measure(layer, bits) for bits in BITS}
        distances = {bits: (d.kl, d.perplexity_change) for bits, d in found.items()}
        parts[layer.path] = {"distances": distances, "cost": [0.0] * 6}
    layers = {
        path: LayerPrecision(e.kind, e.weights, 3, 16, e.kl)
        for path, e in layer_precisions(exact.gearbox.layers, parts).items()
    }
    return exact, PrecisionManifest("exact", "", "", "", 0, "affine", 64, "all", BITS, 1.0, layers)


class TestMeasured:
    def test_is_better_than_uniform_at_the_same_bytes(self, measured):
        exact, manifest = measured
        allocator = Allocator(exact, manifest)
        uniform = dict.fromkeys(manifest.layers, 4)
        budget = allocator.bytes_of(uniform)
        found = allocator.for_bytes(budget)
        assert found.bytes <= budget == allocator.budget(4.5)
        assert found.distance == exact.measure_caps(found.bits)
        assert found.distance.kl < 0.9 * exact.measure_caps(uniform).kl
        assert found.sum_of_parts == pytest.approx(sum(manifest.layers[p].kl[b] for p, b in found.bits.items()))

    def test_exchanges_never_make_it_worse(self, measured):
        exact, manifest = measured
        plain, mended = (Allocator(exact, manifest, trials=n).for_bytes(42000) for n in (0, 6))
        assert mended.distance.kl <= plain.distance.kl
        assert mended.bytes <= 42000

    def test_the_fewest_bytes_for_a_kl(self, measured):
        exact, manifest = measured
        allocator = Allocator(exact, manifest)
        wish = exact.measure_caps(dict.fromkeys(manifest.layers, 4)).kl
        found = allocator.for_kl(wish)
        assert found.distance.kl <= wish
        assert found.bytes < allocator.budget(4.5)
        assert set(allocator.for_kl(0.0).bits.values()) == {8}

    def test_ranges_are_kept_if_asked_for(self, measured):
        exact, manifest = measured
        layers = {path: LayerPrecision(e.kind, e.weights, 4, 4, e.kl) for path, e in manifest.layers.items()}
        narrow = PrecisionManifest("exact", "", "", "", 0, "affine", 64, "all", BITS, 1.0, layers)
        assert set(Allocator(exact, narrow, ranges=True).for_bytes(10**9).bits.values()) == {4}
        assert set(Allocator(exact, narrow).for_bytes(10**9).bits.values()) == {8}


TEXT = ("--num-samples", 2, "--sequence-length", 24)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """A manifest of the demo model, with invented KLs."""
    model, _ = load()
    layers, _ = discover(model, "attention", 64)
    kl = {3: 0.01, 4: 0.002, 8: 0.0}
    held = {each.path: LayerPrecision("attention", each.module.weight.size, 3, 16, kl) for each in layers}
    text = "exact", "demo", model_fingerprint(model), "", 0
    made = PrecisionManifest(*text, "affine", 64, "attention", BITS, 1.0, held)
    file = tmp_path_factory.mktemp("manifest") / "m.json"
    file.write_text(made.as_json())
    return file


class TestCommand:
    def run(self, command, manifest, tmp_path, *arguments):
        return command("allocate", "--manifest", manifest, "--out", tmp_path / "m.json", *TEXT, *arguments)

    def test_tables_at_the_uniform_gears_bits(self, succeeds, manifest, tmp_path):
        result = self.run(succeeds, manifest, tmp_path, "--exchanges", 2)
        assert result.out == f"{tmp_path / 'm.json'}\n"
        made = read_precision(tmp_path / "m.json")
        assert list(made.gears) == [4, 8]
        assert made.gears[4].bits_per_weight <= 4.5
        assert made.gears[8].bits_per_weight <= 8.5
        assert made.gears[4].kl > made.gears[8].kl >= 0
        assert "uniform 4 bits: 4.500" in result.err

    def test_target_outside_ranges_gets_nearest_table(self, succeeds, manifest, tmp_path):
        file = tmp_path / "ranged.json"
        made = json.loads(manifest.read_text())
        for layer in made["layers"].values():
            layer["min_bits"] = 8
        file.write_text(json.dumps(made))
        result = self.run(succeeds, file, tmp_path, "--gears", "4,16", "--exchanges", 0, "--within-ranges")
        assert "no table meets 4.5 bits per weight; the nearest has 8.500 bits per weight" in result.err
        assert set(read_precision(tmp_path / "m.json").gears[4].bits.values()) == {8}

    def test_tokens_per_second(self, succeeds, manifest, tmp_path, monkeypatch):
        """The speed if a byte takes a nanosecond, and the rest of a token a millisecond."""

        def seconds(gearbox):
            return 1e-3 + 1e-9 * sum(gearbox.layer_bytes(each, gearbox.gear) for each in gearbox.layers)

        monkeypatch.setattr("gearbx_mlx.allocate.run.token_seconds", seconds)
        weights = sum(layer.weights for layer in read_precision(manifest).layers.values())
        speed = 1 / (1e-3 + 1e-9 * 5 * weights / 8)
        result = self.run(succeeds, manifest, tmp_path, "--gears", "4,16", "--target-tps", speed, "--exchanges", 0)
        layers = read_precision(tmp_path / "m.json").layers.values()
        step = max(layer.weights for layer in layers) / weights  # one bit more in one layer
        assert 5 - step - 1e-9 <= read_precision(tmp_path / "m.json").gears[4].bits_per_weight <= 5 + 1e-9
        told = float(result.err.split("measured: ")[1].split()[0])
        assert told >= speed * 0.999 - 0.1

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--gears", "16"), "16 is full precision in every layer"),
            (("--gears", "4,16", "--target-bpw", "4,5"), "use 1, one for each of --gears 4,16 but 16"),
            (("--target-kl", "0,1"), "must be above 0"),
            (("--target-kl", "little,less"), "not numbers, got"),
            (("--target-bytes", "much,more"), "not a size, got 'much'"),
            (("--exchanges", -1), "--exchanges: out of range, got -1"),
            (("--out", ""), "--out: empty"),
            (("--manifest", ""), "--manifest: empty"),
            (("--manifest", "a" * 300), "cannot be read as a precision manifest"),
            (("--out", "a" * 300), "cannot be written (File name too long)"),
        ],
    )
    def test_bad_input_is_refused_without_files(self, command, manifest, tmp_path, arguments, told):
        assert_refused(self.run(command, manifest, tmp_path, *arguments), told)
        assert not list(tmp_path.iterdir())
