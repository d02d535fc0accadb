"""benchmark mac --own-kernels with launches on the CPU: every kernel is checked, and what is right is kept."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import tiny_model

from gearbx_mlx.benchmark import metal_checks
from gearbx_mlx.benchmark import own_kernels as subject
from gearbx_mlx.kernels import metal, proven, tuner
from gearbx_mlx.kernels.metal import Prepared

pytestmark = [pytest.mark.slow, pytest.mark.clang]


@pytest.fixture
def short(launches, monkeypatch):
    """One type to check, one number of vectors; gives the launches."""
    for module in (metal_checks, subject):
        monkeypatch.setattr(module, "METAL_DTYPES", (mx.float32,))
    monkeypatch.setattr(subject, "CHECKED_VECTORS", (1,))
    monkeypatch.setattr(subject, "PROVEN_VECTORS", (2,))
    monkeypatch.setattr(tuner, "tolerance", lambda *_: 0.2)  # MLX's products on a CPU add up in bfloat16
    monkeypatch.setattr(tuner, "MAX_CALLS", 1)  # the harness computes while a graph is built, and its clock is 0
    return launches


def only(monkeypatch, *which: str) -> None:
    """Keep only these kernels."""
    kernels = subject.all_kernels

    def some(group_size: int) -> list:
        return [kernel for kernel in kernels(group_size) if kernel.name in which]

    monkeypatch.setattr(subject, "all_kernels", some)
    every_mixture = subject.mixture_checks

    def named(*arguments) -> dict:
        return {name: one for name, one in every_mixture(*arguments).items() if name in which}

    monkeypatch.setattr(subject, "mixture_checks", named)


def test_only_kernels_of_an_original_model_are_checked(short):
    rows = list(subject.check_all(mx.bfloat16))
    assert [row["what"] for row in rows] == ["affine 4", "exact", "dense 16"]
    assert [row["wrong"] for row in rows if row["wrong"]] == []


def test_verifies_every_kernel(short):
    rows = list(subject.check_all())
    assert [row["wrong"] for row in rows if row["wrong"]] == []
    assert all(row["checked"] and 0 < row["largest_error"] <= 1 for row in rows)
    layouts = {launch.spec.layout.name for launch in short}
    wanted = {f"planes_{bits}_g64_b1_r0" for bits in (2, 3, 4, 5, 6, 8)}
    wanted |= {"planes_4_4_g64_b2_r0", "planes_4_1_1_2_g64_b4_r0"}
    wanted |= {f"planes_{bits}_g64_b1_r{of - bits}" for bits, of in ((4, 8), (5, 8), (4, 6))}
    wanted |= {f"rowwise_{bits}" for bits in (8, 6, 4, 2)} | {"groupwise", "exact_g64", "dense"}
    wanted |= {f"codebook_{bits}" for bits in range(2, 7)} | {f"library_{bits}" for bits in (2, 3, 4)}
    assert layouts == wanted
    ragged = {launch.spec.variant.name for launch in short if launch.spec.ragged}
    assert ragged == {*metal.VARIANTS}
    texts = {launch.spec.layout.text for launch in short}
    assert texts == {"matvec", "exact", "dense"}
    packed = {launch.spec.layout.name for launch in short if launch.spec.experts}
    assert packed == {name for name in wanted if not name.startswith(("exact", "dense"))}


def test_a_wrong_kernel_is_named(short, monkeypatch):
    right = Prepared.__call__

    def run(self: Prepared, *inputs: mx.array) -> mx.array:
        name = self.spec.layout.name
        if name == "rowwise_6" and self.spec.ragged:
            return right(self, *inputs) * 1.01
        if name == "groupwise":
            raise RuntimeError("Metal's compiler says no")
        if name == "rowwise_2" and self.spec.vectors == 2:
            return right(self, *inputs) * (1 + 2.0**-20)
        return right(self, *inputs)

    monkeypatch.setattr(Prepared, "__call__", run)
    monkeypatch.setattr(subject, "CHECKED_VECTORS", (2,))
    only(monkeypatch, "rowwise 6", "rowwise 4", "rowwise 2", "groupwise 4", "experts of rowwise 6")
    rows = list(subject.check_all())
    wrong = [text for row in rows for text in row["wrong"]]
    assert any("rowwise 6, 13x533, 2 vectors, float32, metal registers: off by 1" in text for text in wrong)
    assert any("rowwise 2, 37x640, 2 vectors, float32, metal device, the first alone: off by" in text for text in wrong)
    assert "groupwise 4, 37x640, 2 vectors, float32, metal device: Metal's compiler says no" in wrong
    counts = {row["what"]: len(row["wrong"]) for row in rows}
    assert counts == {"rowwise 6": 3, "rowwise 4": 0, "rowwise 2": 6, "groupwise 4": 12, "experts of rowwise 6": 3}


@pytest.fixture
def model() -> nn.Module:
    """Two linear layers of one shape, in bfloat16."""
    layers = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(128, 64, bias=False))
    layers.set_dtype(mx.bfloat16)
    return layers


def test_right_kernels_are_kept_for_each_format(short, model):
    rows = list(subject.prove_all(model))
    ways = {("original weights", 2), ("4 bits", 2), ("exact", 0), ("exact", 2)}
    assert {(row["stored"], row["vectors"]) for row in rows} == ways
    assert [row["wrong"] for row in rows if row["wrong"]] == []
    forms = "weights", "affine", "exact", "decoding"
    assert [sum(form in key for key in proven.proofs_here()) for form in forms] == [1, 3, 1, 1]
    for row in rows:
        assert row["won"] == (row["seconds"] * proven.LEAD < row["seconds_of_mlx"])
    assert proven.proof(proven.decoder_key(64)) is not None


@pytest.mark.parametrize("refused", [False, True])
def test_wrong_or_uncompilable_kernels_are_named_and_dropped(short, model, monkeypatch, refused):
    list(subject.prove_all(model))
    right = Prepared.__call__

    def wrong(self: Prepared, *inputs: mx.array) -> mx.array:
        if refused:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        return right(self, *inputs) * 1.5

    monkeypatch.setattr(Prepared, "__call__", wrong)
    rows = list(subject.prove_all(model))
    assert all(row["wrong"] and not row["won"] for row in rows)
    assert not proven.proofs_here()


def test_shapes_match_model():
    model = tiny_model(dtype=mx.bfloat16)
    shapes = {tuple(layers.kind.shape) for layers in subject.layers_of_shapes(model)}
    linear = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)}
    assert linear <= shapes | {shape for shape in linear if shape[1] % 64}


def test_summary_counts_own_kernels_faster_than_mlx():
    plain = {"stored": "4 bits", "vectors": 2, "kernel": "registers", "wrong": "", "won": False, "seconds_of_mlx": 1.0}
    rows = [
        {**plain, "shape": [8, 64], "seconds": 2.0},
        {**plain, "shape": [8, 64], "seconds": 0.5, "kernel": "device", "won": True},
        {**plain, "shape": [16, 64], "seconds": 1.0, "wrong": "does not run"},
    ]
    (line,) = subject.in_short(rows)
    assert [*line.values()] == ["4 bits", "2", "1.00 (0.00-2.00)", "1", "2", "1"]
