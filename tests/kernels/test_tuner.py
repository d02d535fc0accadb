"""Kernels are chosen by measurements on this machine; a small file in the user's cache keeps them."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import normal

from gearbx_mlx import Gearbox
from gearbx_mlx.errors import GearbxWarning
from gearbx_mlx.files.measured_file import MAX_MACHINES
from gearbx_mlx.gears.kernel_choices import measure_gears
from gearbx_mlx.kernels import dispatch, tuner
from gearbx_mlx.kernels.dispatch import GPU, METAL, MLX, NATIVE, RECONSTRUCT, CannotMeasure, KernelChoice, MatmulKind
from gearbx_mlx.kernels.rounding import expected_of_dense, tolerance
from gearbx_mlx.kernels.tuner import EXPECTED, Tuner, TuningCache, enough_calls, fastest, timed_in_turn, times_of

WIDTH = 512  # so that a layer is worth measuring
AFFINE = "affine 4, group 64, 512 x 512, float32, activations of 16 bits, 1 vector"
DENSE = "weights of 32 bits, 512 x 512, float32, 1 vector"
PLANES = MatmulKind("planes 4+4, group 64", (4096, 4096), stock=True)
ROWWISE = MatmulKind("rowwise 4", (4096, 4096), stock=False)


@pytest.fixture
def cache(own_cache, monkeypatch) -> Path:
    """The file of an empty cache, with measurements switched on."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    return own_cache / "tuning.json"


def tuner_for(dtype: mx.Dtype, cache: TuningCache | None = None, **choice: bool) -> Tuner:
    return Tuner(dtype, KernelChoice(True, "for a test", **choice), cache)


def two_layers() -> nn.Module:
    mx.random.seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


def boxed(**settings) -> Gearbox:
    return Gearbox(two_layers(), "4,16", **{"format": "affine", "kernels": "auto"} | settings)


def plant(file: Path, product: str, **seconds: float) -> None:
    """A cache with a measurement of this machine, for one vector and for 16."""
    many = product.replace("1 vector", "16 vectors")
    file.write_text(json.dumps({"machines": {tuner.machine(): {product: seconds, many: seconds}}}))


class TestGearbox:
    def test_measures_each_kind_of_product_once(self, cache):
        measure_gears(boxed())
        first = cache.read_bytes()
        (found,) = json.loads(first)["machines"].values()
        assert found.keys() >= {AFFINE, DENSE}
        assert all({*times} == {NATIVE, MLX} and min(times.values()) > 0 for times in found.values())
        measure_gears(boxed())
        assert cache.read_bytes() == first

    def test_uses_fastest_kernel(self, cache):
        x, results = normal(1, WIDTH), {}
        for winner, loser in ((NATIVE, MLX), (MLX, NATIVE)):
            plant(cache, AFFINE, **{winner: 1e-6, loser: 2e-6})
            box = boxed()
            box.shift("low")
            assert box.kernel_choices.tuner.used[AFFINE][0] == winner
            results[winner] = box.model(x)
        for kernels, name in (("native", NATIVE), ("mlx", MLX)):
            box = boxed(kernels=kernels)
            box.shift("low")
            assert mx.array_equal(results[name], box.model(x)).item()
        assert not mx.array_equal(results[MLX], results[NATIVE]).item()

    def test_measures_again_when_asked(self, cache):
        plant(cache, AFFINE, native=2.0, mlx=1.0)
        box = boxed(kernels="measure")
        measure_gears(box)
        chosen, times = box.kernel_choices.tuner.used[AFFINE]
        assert max(times.values()) < 1
        assert chosen == fastest(times, [NATIVE, MLX])

    def test_measuring_is_optional_and_native_excludes_mlx(self, cache, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setenv("GEARBX_TUNE", "0")
            measure_gears(boxed())
        assert not cache.exists()
        plant(cache, AFFINE, native=2.0, mlx=1.0)
        box = boxed(kernels="native")
        box.shift("low")
        assert box.kernel_choices.tuner.used == {}

    def test_works_inside_of_compile(self, cache):
        box = boxed()
        with mx.stream(mx.cpu):
            step = mx.compile(lambda x: box.model(x), inputs=box.model.state)
            compiled = step(normal(1, WIDTH))
            assert DENSE not in box.kernel_choices.tuner.used
            assert mx.allclose(compiled, box.model(normal(1, WIDTH)), rtol=1e-4, atol=1e-4).item()
            assert DENSE in box.kernel_choices.tuner.used


def wrong_where(name: str, change=lambda y: 1.25 * y):
    """The products of two weights; the candidate `name` computes wrong ones."""
    weights = [normal(256, 384, seed=seed) for seed in (1, 2)]

    def products(candidate: str) -> list:
        if candidate == EXPECTED:
            return [lambda x, w=w: expected_of_dense(x, w, None) for w in weights]
        by = change if candidate == name else lambda y: y
        return [lambda x, w=w: by(x @ w.T) for w in weights]

    return products


class TestVerifiedKernels:
    STOCK_KIND = MatmulKind("planes 4+4, group 64", (256, 384), stock=True)
    OUR_KIND = MatmulKind("exact, group 64", (256, 384), stock=False, variants=(NATIVE,), most_bits=0)

    @pytest.fixture
    def on_metal(self, monkeypatch, cache):
        for module in (dispatch, tuner):
            monkeypatch.setattr(module, "device", lambda: METAL)
        return cache

    @pytest.mark.parametrize("wrong", ["registers", "device", "threadgroup"])
    def test_wrong_kernel_never_wins(self, on_metal, monkeypatch, wrong):
        monkeypatch.setattr(tuner, "MIN_WEIGHTS", 0)
        made = tuner_for(mx.float32, again=True)
        times = {each: 1e-6 if each == wrong else 1e-3 for each in self.STOCK_KIND.candidates(1, mx.float32)}
        made.cache.keep(made.name(self.STOCK_KIND, 1), times)
        assert made.choose(self.STOCK_KIND, 1, wrong_where(wrong)) == MLX
        ((name, found),) = made.wrong.items()
        assert "256 x 384" in name
        # A quarter of the largest of 256 sums.
        assert found == {wrong: pytest.approx(1 / tolerance(mx.float32, 384), rel=0.4)}
        right = tuner_for(mx.float32, TuningCache(on_metal.with_name("another")), again=True)
        right.cache.keep(made.name(self.STOCK_KIND, 1), times)
        assert right.choose(self.STOCK_KIND, 1, wrong_where("none")) == wrong
        assert right.wrong == {}

    def test_mlx_computes_without_right_kernel(self, on_metal):
        for vectors in (1, 3, 600):  # of many, the weight that our kernel decodes
            made = tuner_for(mx.bfloat16, ours_alone=True)
            first = self.OUR_KIND.candidates(vectors, mx.bfloat16)[0]
            assert made.choose(self.OUR_KIND, vectors, wrong_where("none")) == first
            wrong = tuner_for(mx.bfloat16, TuningCache(on_metal.with_name(f"{vectors}")), ours_alone=True)
            assert wrong.choose(self.OUR_KIND, vectors, wrong_where(first)) != first

    def test_kernel_is_verified_at_exact_vector_count(self, on_metal):
        def products(candidate: str) -> list:
            (one, _) = wrong_where("none")(candidate)
            return [lambda x: one(x) + (candidate == NATIVE and len(x) == 3)]

        made = [tuner_for(mx.float32, ours_alone=True) for _ in range(3)]
        chosen = [each.choose(self.OUR_KIND, vectors, products) for vectors, each in enumerate(made, 2)]
        assert chosen == [NATIVE, MLX, NATIVE]

    def test_every_layer_counts(self, on_metal):
        def products(candidate: str) -> list:
            first, second = wrong_where("none")(candidate)
            return [first, second if candidate == MLX else lambda x: -second(x)]

        assert tuner_for(mx.float32, ours_alone=True).choose(self.OUR_KIND, 1, products) == MLX

    def test_the_difference_is_kept(self, on_metal):
        first = tuner_for(mx.float32, ours_alone=True)
        assert first.choose(self.OUR_KIND, 1, wrong_where(NATIVE)) == MLX
        first.cache.save()
        second = tuner_for(mx.float32, ours_alone=True)
        assert second.choose(self.OUR_KIND, 1, lambda candidate: []) == MLX  # nothing to compare with
        assert second.wrong == first.wrong
        ((stored,),) = [each.values() for each in json.loads(on_metal.read_text())["differences"].values()]
        assert [stored] == [*first.wrong.values()]

    @pytest.mark.parametrize("result", [mx.nan, mx.inf])
    def test_nonfinite_results_are_wrong(self, on_metal, result):
        made = tuner_for(mx.float32, ours_alone=True)
        assert made.choose(self.OUR_KIND, 1, wrong_where(NATIVE, lambda y: result * y)) == MLX
        made.cache.save()
        assert TuningCache().differences

    @pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
    def test_rounding_is_accepted(self, on_metal, dtype):
        eps = mx.finfo(dtype).eps
        for size, chosen in ((1 / 4, NATIVE), (64, MLX)):
            made = tuner_for(dtype, TuningCache(on_metal.with_name(f"{size}")), ours_alone=True)
            found = made.choose(self.OUR_KIND, 1, wrong_where(NATIVE, lambda y, size=size: (1 + size * eps) * y))
            assert found == chosen

    def test_uncomputable_candidates_have_no_results(self, on_metal):
        made = tuner_for(mx.float32, ours_alone=True)
        with pytest.raises(CannotMeasure) as raised:
            made.choose(self.OUR_KIND, 1, lambda candidate: [])
        assert raised.value.instead == MLX
        assert made.cache.differences == {}

    @pytest.mark.usefixtures("native")
    def test_on_a_cpu_when_a_kind_is_measured(self, cache, monkeypatch):
        kind = MatmulKind("weights of 32 bits", (256, 384), stock=True, variants=(NATIVE,), most_bits=0)
        monkeypatch.setattr(tuner, "MIN_WEIGHTS", 0)
        first = tuner_for(mx.float32)
        assert first.choose(kind, 1, wrong_where(NATIVE)) == MLX
        first.cache.save()
        second = tuner_for(mx.float32)
        assert second.choose(kind, 1, lambda candidate: []) == MLX
        assert second.wrong == first.wrong
        assert next(iter(first.wrong.values())).keys() == {NATIVE}

    @pytest.mark.usefixtures("native")
    def test_own_cpu_kernels_are_right(self, cache):
        box = boxed()
        measure_gears(box)
        assert box.kernel_choices.tuner.wrong == {}
        assert box.kernel_choices.tuner.cache.differences


class TestCache:
    def test_entry_of_other_machine_stays_unused(self, cache):
        cache.write_text(json.dumps({"machines": {"a GPU that went": {AFFINE: {"native": 1.0}}}}))
        kept = TuningCache()
        assert kept.times == {}
        kept.keep(AFFINE, {"mlx": 2.0})
        kept.save()
        stored = json.loads(cache.read_text())["machines"]
        assert stored == {"a GPU that went": {AFFINE: {"native": 1.0}}, tuner.machine(): {AFFINE: {"mlx": 2.0}}}

    def test_measuring_again_ignores_earlier_starts(self, cache):
        plant(cache, AFFINE, mlx=1.0)
        again = TuningCache(again=True)
        assert again.times == again.differences == {}
        again.keep("another", {"mlx": 2.0})
        again.save()
        assert again.times.keys() == {"another"}
        assert TuningCache().times.keys() >= {AFFINE, "another"}

    def test_other_device_is_other_machine(self, monkeypatch):
        names = set()
        for device in (dispatch.CPU, METAL, GPU):
            monkeypatch.setattr(tuner, "device", lambda device=device: device)
            names.add(tuner.machine())
        assert len(names) == 3

    @pytest.mark.parametrize("content", [b"{", b"[]", b'{"machines": {"a": {"b": {"c": -1}}}}', b"\xff", b""])
    def test_corrupt_cache_is_reported_and_rewritten(self, cache, content):
        cache.write_bytes(content)
        kept = TuningCache()
        with pytest.warns(GearbxWarning, match=r"tuning\.json: .*written again"):
            assert kept.times == {}
        kept.keep(AFFINE, {"mlx": 2.0})
        kept.save()
        assert TuningCache().times == {AFFINE: {"mlx": 2.0}}  # a warning would be an error

    @pytest.mark.parametrize("place", ["file", "folder"])
    def test_cache_writable_by_others_is_ignored(self, cache, place):
        cache.write_text(json.dumps({"machines": {tuner.machine(): {AFFINE: {"mlx": 2.0}}}}))
        path = cache if place == "file" else cache.parent
        path.chmod(path.stat().st_mode | 0o020)
        before = cache.read_bytes()
        kept = TuningCache()
        with pytest.warns(GearbxWarning, match=f"^others may write to {path}; run chmod go-w on it; until then"):
            assert kept.times == {}
        kept.keep(AFFINE, {"mlx": 3.0})
        kept.save()
        assert cache.read_bytes() == before

    def test_keeps_concurrent_entries(self, cache):
        first, second = TuningCache(), TuningCache()
        for kept, name in ((first, "a"), (second, "b")):
            assert kept.times == {}
            kept.keep(name, {"mlx": 2.0})
        first.save()
        second.save()
        assert TuningCache().times == {"a": {"mlx": 2.0}, "b": {"mlx": 2.0}}

    def test_of_two_processes_at_once_is_whole(self, tmp_path):
        text = (
            "import sys; from pathlib import Path; from gearbx_mlx.kernels.tuner import TuningCache\n"
            "for i in range(40):\n"
            "    kept = TuningCache(Path(sys.argv[1]))\n"
            "    kept.times; kept.keep(f'{sys.argv[2]} {i}', {'mlx': 1.0}); kept.save()\n"
        )
        file = tmp_path / "tuning.json"
        commands = [[sys.executable, "-W", "error", "-c", text, str(file), name] for name in "ab"]
        processes = [subprocess.Popen(command) for command in commands]
        assert [process.wait() for process in processes] == [0, 0]
        found = TuningCache(file).times
        assert found.keys() == {f"{name} {i}" for name in "ab" for i in range(40)}
        assert {path.name for path in tmp_path.iterdir()} == {"tuning.json", ".tuning.json.lock"}

    def test_keeps_the_newest_machines(self, cache):
        cache.write_text(json.dumps({"machines": {f"old {i}": {} for i in range(40)}}))
        kept = TuningCache()
        kept.keep(AFFINE, {"mlx": 2.0})
        kept.save()
        assert list(json.loads(cache.read_text())["machines"])[-2:] == ["old 39", tuner.machine()]
        assert len(json.loads(cache.read_text())["machines"]) == MAX_MACHINES


class TestCandidates:
    @pytest.fixture
    def on(self, monkeypatch):
        return lambda device: monkeypatch.setattr(dispatch, "device", lambda: device)

    def test_candidates_on_metal_fit_its_memory(self, on):
        on(METAL)
        ours = ("registers", "threadgroup", "device")
        assert PLANES.candidates(1, mx.float16) == (MLX, *ours)
        assert PLANES.candidates(1, mx.float16, ours_alone=True) == ours
        assert PLANES.candidates(4, mx.float16) == (MLX, "registers", "device", RECONSTRUCT)  # 32 KiB of activations
        assert PLANES.candidates(16, mx.float32) == (MLX, "device", "registers", RECONSTRUCT)  # 256 KiB of activations
        assert PLANES.candidates(17, mx.float16) == (MLX, RECONSTRUCT)

    def test_single_token_never_dequantizes_if_kernel_exists(self, on, native):
        for device in (METAL, dispatch.CPU):
            on(device)
            assert RECONSTRUCT not in ROWWISE.candidates(1, mx.float32)
        on(GPU)
        assert ROWWISE.candidates(1, mx.float16) == (RECONSTRUCT,)
        assert PLANES.candidates(1, mx.float16) == (MLX,)
        assert PLANES.candidates(8, mx.float16) == (MLX, RECONSTRUCT)

    def test_first_stays_unless_other_is_faster_by_margin(self):
        assert fastest({"a": 1.04, "b": 1.0}, ["a", "b"]) == "a"
        assert fastest({"a": 1.06, "b": 1.0}, ["a", "b"]) == "b"

    def test_sizes_between_powers_of_two_share_measurements(self, cache):
        made = tuner_for(mx.float16)
        name = made.name(MatmulKind("rowwise 4", (1025, 3000), stock=False), 5)
        assert name == "rowwise 4, 2048 x 4096, float16, 8 vectors"
        assert name == made.name(MatmulKind("rowwise 4", (2048, 4096), stock=False), 8)

    def test_uncompilable_candidate_is_never_chosen(self):
        def refused(x: mx.array) -> mx.array:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")

        times = times_of({"a": [refused], "b": [lambda x: x + 1]}, mx.ones(8))
        assert times["a"] == tuner.FAILED
        assert fastest(times, ["a", "b"]) == "b"

    def test_memory_error_is_no_measurement(self, cache, monkeypatch):
        def without_memory(x: mx.array) -> mx.array:
            raise RuntimeError("[malloc] Unable to allocate")

        monkeypatch.setattr(tuner, "device", lambda: GPU)
        made = tuner_for(mx.float32)
        with pytest.raises(CannotMeasure) as raised:
            made.times("a", PLANES, 8, lambda candidate: [without_memory], (MLX, RECONSTRUCT))
        assert raised.value.instead == MLX
        assert made.cache.times == {}

    def test_mlx_on_cpu_must_win_for_many_vectors(self, cache, native):
        made = tuner_for(mx.float32)
        kind = MatmulKind("weights of 32 bits", (512, 512), stock=True, most_bits=0)
        for one, many, chosen in ((2.0, 2.0, MLX), (2.0, 0.5, NATIVE), (0.5, 2.0, NATIVE)):
            made.cache.keep(made.name(kind, 1), {NATIVE: one, MLX: 1.0})
            made.cache.keep(made.name(kind, 16), {NATIVE: many, MLX: 1.0})
            assert made.choose(kind, 3, lambda candidate: []) == chosen


SLOW, FAST = mx.ones((160, 160)), mx.ones((8, 8))


def product(matrix: mx.array):
    return lambda: [matrix @ matrix]


def test_small_launches_are_many_and_large_ones_few():
    calls = enough_calls(product(FAST), least=0.002)
    assert 1 < calls <= tuner.MAX_CALLS
    assert enough_calls(product(SLOW), least=0.0) == 1
    assert enough_calls(product(mx.ones((2, 2))), least=60) == tuner.MAX_CALLS


def test_slow_candidate_is_abandoned():
    times = timed_in_turn({"slow": product(SLOW), "fast": product(FAST)}, trials=4, least=0.001, give_up=3)
    assert (len(times["slow"]), len(times["fast"])) == (1, 4)
