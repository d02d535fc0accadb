"""Mixtures of experts over codebooks: each pair of a vector and an expert as the product with that expert alone."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.kernels.metal_products import experts_launch, pairs_of_a_vector

from .cases import CODEBOOKS, Case, codebook_arrays, problem, run_launch
from .checks import exact

CASES = [
    *(Case(bits, 13, 85, format="codebook") for bits in range(2, 7)),
    *(Case(bits, 13, 300, format="codebook-library", variant="threadgroup") for bits in (2, 3, 4)),
    Case(4, 21, 600, format="codebook", variant="device", dtype=mx.bfloat16),
    Case(4, 9, 40, format="codebook", dtype=mx.float32),
]
EXPERTS = 4
CHOSEN = [[2, 0], [2, 3], [0, 2]]  # never expert 1


def alone(case: Case) -> list[dict[str, mx.array]]:
    """The arrays of each expert, whose lists of outliers have lengths of their own."""
    return [codebook_arrays(case, problem(case, seed)) for seed in range(EXPERTS)]


def stacked(experts: list[dict[str, mx.array]]) -> dict[str, mx.array]:
    def padded(name: str) -> list[mx.array]:
        most = max(len(arrays[name]) for arrays in experts)
        return [mx.pad(arrays[name], (0, most - len(arrays[name])), constant_values=7) for arrays in experts]

    lists = ("outliers", "outlier_columns")
    return {name: mx.stack(padded(name) if name in lists else [a[name] for a in experts]) for name in experts[0]}


@pytest.mark.some(2)
@pytest.mark.clang
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["a vector for both", "a vector each"])
def test_a_pair_has_the_bits_of_the_expert_alone_and_reads_its_bytes(case, shared):
    experts, indices = alone(case), mx.array(CHOSEN, mx.uint32)
    x = mx.random.normal((3, 1 if shared else 2, 1, case.columns), key=mx.random.key(1)).astype(case.dtype)
    report = run_launch(experts_launch(x, stacked(experts), case.bits, indices, case.variant))
    assert report.error == ""
    assert (report.writes["out"] == 1).all()
    names = [name for name in report.reads if name not in ("x", "experts", "sizes", "out")]
    found = {name: np.split(report.reads[name], EXPERTS) for name in names}
    wanted = {name: [np.zeros_like(part) for part in parts] for name, parts in found.items()}
    for token, row in enumerate(CHOSEN):
        for k, expert in enumerate(row):
            vector = x[token, 0 if shared else k]
            one = run_launch(CODEBOOKS[case.format][1](vector, experts[expert], case.bits, None, case.variant))
            assert np.array_equal(report.out[0][token, k], one.out[0])
            for name in names:  # the lists of outliers are padded here
                wanted[name][expert][: len(one.reads[name])] += one.reads[name]
    for name in names:
        assert all(map(np.array_equal, found[name], wanted[name])), name
        assert not found[name][1].any()


@pytest.mark.parametrize(
    ("x", "indices", "together"),
    [
        ((3, 1, 1, 8), (3, 2), 2),
        ((3, 2, 1, 8), (3, 2), 1),
        ((6, 1, 8), (6,), 1),
        ((1, 8), (4,), None),
        ((1, 2, 1, 8), (3, 2), None),
        ((3, 1, 2, 8), (3, 2), None),
    ],
)
def test_how_vectors_and_indices_lie(x, indices, together):
    assert pairs_of_a_vector(mx.zeros(x), mx.zeros(indices, mx.uint32)) == together


def test_arrays_that_do_not_fit_are_refused():
    case = CASES[1]
    arrays, indices = stacked(alone(case)), mx.array(CHOSEN)
    x = mx.zeros((3, 1, 1, case.columns), case.dtype)
    with pytest.raises(GearbxError, match="codebook is"):
        experts_launch(x, arrays | {"codebook": arrays["codebook"][:2]}, case.bits, indices)
    with pytest.raises(GearbxError, match="not a list for each expert"):
        experts_launch(x, arrays | {"outliers": arrays["outliers"][0]}, case.bits, indices)
    with pytest.raises(GearbxError, match="weight is"):
        experts_launch(mx.zeros((3, 1, 1, 2 * case.columns), case.dtype), arrays, case.bits, indices)


@pytest.mark.slow
@pytest.mark.clang
@pytest.mark.parametrize(("format", "bits"), [("codebook", 3), ("codebook-library", 4)])
def test_a_mixture_decodes_with_a_launch_for_each_stack_of_experts(format, bits, launches):
    native, stock = (
        Gearbox(tiny_model("qwen3_moe"), f"{bits},16", format=format, kernels=kernels) for kernels in ("native", "mlx")
    )
    for gearbox in (native, stock):
        gearbox.shift("low")
    token = mx.array([[7]])
    wanted = exact(stock.model(token))
    launches.clear()
    np.testing.assert_allclose(exact(native.model(token)), wanted, atol=1e-4 * np.abs(wanted).max())
    mixtures = [launch for launch in launches if getattr(launch.spec, "experts", False)]
    assert len(mixtures) == sum("switch_mlp" in layer.path for layer in native.layers)
    assert all(dataclasses.asdict(launch.spec)["vectors"] == 1 for launch in mixtures)
