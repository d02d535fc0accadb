"""Mixtures of experts: each pair of a vector and an expert gives the same as the product with that expert alone."""

import dataclasses
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.kernels import proven
from gearbx_mlx.kernels.metal_products import pairs_of_a_vector

from .cases import Case, Problem, launch, problem, run_launch
from .checks import exact
from .test_mutations import changer

CASES = [
    *(Case(bits, 13, 85, format="codebook") for bits in range(2, 7)),
    *(Case(bits, 13, 300, format="codebook-library", variant="threadgroup") for bits in (2, 3, 4)),
    Case(4, 21, 600, format="codebook", variant="device", dtype=mx.bfloat16),
    Case(4, 9, 40, format="codebook", dtype=mx.float32),
    *(Case((bits,), 13, 128) for bits in (2, 3, 4, 5, 6, 8)),
    Case((4, 4), 13, 640, variant="threadgroup", dtype=mx.bfloat16),
    Case((4, 1, 1, 2), 9, 96, 32, dtype=mx.float32),
    Case((3, 5), 21, 256, 128, variant="device"),
    *(Case(bits, 13, 85, format="rowwise") for bits in (8, 6, 4, 2)),
    Case(8, 9, 533, format="rowwise", variant="threadgroup", dtype=mx.float32),
    Case(4, 13, 85, format="groupwise"),
    Case(4, 9, 533, format="groupwise", variant="device", dtype=mx.bfloat16),
]
EXPERTS = 4
CHOSEN = [[2, 0], [2, 3], [0, 2]]  # never expert 1


def alone(case: Case) -> list[Problem]:
    """The experts; their lists of outliers have different lengths."""
    return [problem(case, seed) for seed in range(EXPERTS)]


def stacked(experts: list[Problem]) -> dict[str, mx.array]:
    """Their arrays, with a leading dimension; lists of outliers are padded."""

    def padded(name: str) -> list[mx.array]:
        most = max(len(p.arrays[name]) for p in experts)
        return [mx.pad(p.arrays[name], (0, most - len(p.arrays[name])), constant_values=7) for p in experts]

    lists = ("outliers", "outlier_columns")
    names = experts[0].arrays
    return {name: mx.stack(padded(name) if name in lists else [p.arrays[name] for p in experts]) for name in names}


def fault_of_experts(case: Case, shared: bool, change: Callable[[str], str] | None = None) -> str:
    """Return what is wrong with the products of CHOSEN; "" if nothing is. shared: whether a token has one vector."""
    experts, indices = alone(case), mx.array(CHOSEN, mx.uint32)
    x = mx.random.normal((3, 1 if shared else 2, 1, case.columns), key=mx.random.key(1)).astype(case.dtype)
    report = run_launch(launch(case, Problem(x, stacked(experts), None), indices), change=change)
    if report.error:
        return report.error
    if not (report.writes["out"] == 1).all():
        return "not written once"
    names = [name for name in report.reads if name not in ("x", "experts", "sizes", "out")]
    found = {name: np.split(report.reads[name], EXPERTS) for name in names}
    wanted = {name: [np.zeros_like(part) for part in parts] for name, parts in found.items()}
    for token, row in enumerate(CHOSEN):
        for k, expert in enumerate(row):
            vector = x[token, 0 if shared else k]
            one = run_launch(launch(case, Problem(vector, experts[expert].arrays, None)))
            if not np.array_equal(report.out[0][token, k], one.out[0]):
                return f"token {token}, expert {expert}: other bits"
            for name in names:  # the lists of outliers are padded here
                wanted[name][expert][: len(one.reads[name])] += one.reads[name]
    wrong = [name for name in names if not all(map(np.array_equal, found[name], wanted[name]))]
    return f"{', '.join(wrong)}: other bytes are read" if wrong else ""


@pytest.mark.some(2)
@pytest.mark.clang
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["a vector for both", "a vector each"])
def test_pair_equals_single_expert_and_reads_its_bytes(case, shared):
    assert fault_of_experts(case, shared) == ""


MUTATIONS = {
    "codes of the first expert": ("PLANES(NEXT_PLANE)", ""),
    "scales of the first expert": ("SCALE_ARRAYS(NEXT)", ""),
    "rows of the other pair": ("threadgroup_position_in_grid.x % of_a_pair", "threadgroup_position_in_grid.x / 2"),
    "vector of the other pair": ("size_t(pair / pairs_of_a_vector)", "size_t(pair / 3)"),
    "written over": ("out += size_t(pair) * rows;", ""),
    "the next expert": ("= experts[pair];", "= (experts[pair] + 1) % 4;"),
    "experts closer together": ("expert * (count);", "expert * (count) / 2;"),
}


@pytest.mark.clang
@pytest.mark.metal_mutations
@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize(
    "case", [Case((4, 4), 13, 640), Case(6, 13, 85, format="rowwise"), Case(4, 13, 85, format="groupwise")], ids=str
)
def test_a_mistake_is_caught(case, name):
    assert fault_of_experts(case, False, changer(*MUTATIONS[name])) != ""


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
def test_vector_and_index_layouts(x, indices, together):
    assert pairs_of_a_vector(mx.zeros(x), mx.zeros(indices, mx.uint32)) == together


def refused(case: Case, x: mx.array, arrays: dict[str, mx.array], **how) -> str:
    with pytest.raises(GearbxError) as caught:
        launch(case, Problem(x, arrays, how.get("bias")), mx.array(CHOSEN))
    return str(caught.value)


def test_mismatched_arrays_are_refused():
    case = CASES[1]
    arrays, x = stacked(alone(case)), mx.zeros((3, 1, 1, case.columns), case.dtype)
    assert "codebook: must be" in refused(case, x, arrays | {"codebook": arrays["codebook"][:2]})
    assert "must be one list per expert" in refused(case, x, arrays | {"outliers": arrays["outliers"][0]})
    assert "weight: must be" in refused(case, mx.zeros((3, 1, 1, 2 * case.columns), case.dtype), arrays)
    case = Case((4, 4), 13, 128)
    arrays, x = stacked(alone(case)), mx.zeros((3, 1, 1, case.columns), case.dtype)
    assert "plane 1: must be" in refused(case, x, arrays | {"w1": arrays["w1"][:2]})
    assert "3 dimensions" in refused(case, x, arrays | {"scales": arrays["scales"][0]})
    assert "one per index" in refused(case, x[0], arrays)
    assert "one per index" in refused(case, x[..., :64], arrays)
    assert "one per index" in refused(case, x.astype(mx.int32), arrays)
    assert "output bias" in refused(case, x, arrays, bias=mx.zeros((13,)))
    for case in (Case(6, 13, 85, format="rowwise"), Case(4, 13, 85, format="groupwise")):
        arrays, x = stacked(alone(case)), mx.zeros((3, 1, 1, case.columns), case.dtype)
        assert "must be rows of 85" in refused(case, x, arrays | {"w0": arrays["w0"][0]})
        assert "scales: must have 13 rows" in refused(case, x, arrays | {"scales": arrays["scales"][:2]})


MODELS = {"codebook": 3, "codebook-library": 4, "affine": 5, "rowwise": 6, "groupwise": 4}
TOKEN = mx.array([[7]])


def boxed(format: str, kernels: str, gears: str = "") -> Gearbox:
    gearbox = Gearbox(tiny_model("qwen3_moe"), gears or f"{MODELS[format]},16", format=format, kernels=kernels)
    gearbox.shift("low")
    return gearbox


def of_experts(gearbox: Gearbox, launches: list) -> list[dict]:
    """The launches of experts in one pass over a token."""
    launches.clear()
    gearbox.model(TOKEN)
    return [dataclasses.asdict(made.spec) for made in launches if made.spec.experts]


def stacks_of(gearbox: Gearbox) -> int:
    return sum("switch_mlp" in layer.path for layer in gearbox.layers)


@pytest.mark.slow
@pytest.mark.clang
@pytest.mark.parametrize("format", MODELS)
def test_moe_decode_launches_once_per_expert_stack(format, launches):
    native, stock = (boxed(format, kernels) for kernels in ("native", "mlx"))
    wanted = exact(stock.model(TOKEN))
    np.testing.assert_allclose(exact(native.model(TOKEN)), wanted, atol=1e-4 * np.abs(wanted).max())
    mixtures = of_experts(native, launches)
    assert len(mixtures) == stacks_of(native)
    assert {spec["vectors"] for spec in mixtures} == {1}
    launches.clear()
    native.model(mx.array([[1, 5, 9] * 50]))  # of more pairs than a kernel takes
    assert not any(made.spec.experts for made in launches)


@pytest.mark.clang
@pytest.mark.parametrize("format", ["affine", "rowwise"])
def test_auto_launches_proven_expert_kernels(format, launches, monkeypatch):
    assert of_experts(boxed(format, "auto"), launches) == []

    def proof(key: str) -> proven.Proof | None:
        return proven.Proof(1.0, 2.0) if "experts of" in key and key.endswith("1 vector, registers") else None

    monkeypatch.setattr(proven, "proof", proof)
    monkeypatch.setattr(proven, "any_won", lambda: True)
    gearbox = boxed(format, "auto")
    assert len(of_experts(gearbox, launches)) == stacks_of(gearbox)
