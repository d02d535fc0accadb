"""A row has the same bits in any company: in each kernel alone, and through whole blocks of a model."""

import copy
import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal, tiny_model
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox
from gearbx_mlx.formats.fused import inverse_frequencies
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.metal import Launch, Prepared
from gearbx_mlx.kernels.metal_attention import join_launch, parts_launch, rope_launch
from gearbx_mlx.kernels.metal_products import dense_launch

from .cases import Case, launch, problem, run_launch
from .checks import SMALLEST, UNIT, attended, exact
from .launch import Report
from .test_mutations import changer

DENSE_SUM = "fma(weights[r][i], held[i], sums[r][v])"
PACKED_SUM = "fma(scale, dots[v], fma(offset, x_sums[v], sums[r][v]))"
ORDER_BY_ROWS = {  # text: gear, its sum, another that depends on the number of rows
    "dense": ("high", DENSE_SUM, f"(VECTORS > 1 ? weights[r][i] * held[i] + sums[r][v] : {DENSE_SUM})"),
    "matvec": (
        "mid",
        PACKED_SUM,
        f"(VECTORS > 1 ? fma(offset, x_sums[v], fma(scale, dots[v], sums[r][v])) : {PACKED_SUM})",
    ),
    "attention": ("high", "fma(held[i], key[i], weights[q])", "fma(held[i ^ CAUSAL], key[i ^ CAUSAL], weights[q])"),
}

pytestmark = pytest.mark.clang

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
ORDERS = ((0, 0), (1, 1), (2, 7))  # of reductions, and of threads
CONTEXT = [int(t) for t in np.random.default_rng(1).integers(0, 64, 120)]  # the rows behind it cross a block of keys
ROWS = [7, 3, 11, 5, 2, 9, 4, 6, 1, 8, 10, 12, 3, 7, 5, 2]


def ran(made: Launch, order: int = 0, schedule: int = 0) -> tuple[mx.array, Report]:
    """The result of a launch without a fault, and its effects."""
    report = run_launch(made, order, schedule)
    assert report.error == ""
    assert all((report.reads[name] <= 1).all() for name in made.spec.read_once)
    assert (report.writes["out"] == 1).all()
    return made.prepared.result(mx.array(report.out[0], made.prepared.options["output_dtypes"][0])), report


def same_bits(a: mx.array, b: mx.array) -> bool:
    assert a.dtype == b.dtype
    return mx.array_equal(a.view(mx.uint16), b.view(mx.uint16)).item()


def masked(kind: str, length: int, keys: int) -> tuple[np.ndarray, mx.array | str | None]:
    """Return which keys queries see, (L, S), and the mask that says so: causal, some or all."""
    seen = np.arange(keys) <= keys - length + np.arange(length)[:, None]
    if kind != "causal":
        seen = np.random.default_rng(3).random((length, keys)) < (0.4 if kind == "some" else 2)
        seen[:, 0] = True
    return seen, {"causal": "causal", "some": mx.array(seen), "all": None}[kind]


TO_SCORES = "\n    UNROLL for (int q = 0; q < QUERIES; q++) {\n        weights[q] = 0.0f;"
TO_VALUES = "\n    COPY(values"
TO_SUMS = "\n    for (int key"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
ATTENTION = {  # mistakes: the text, its replacement
    "no barrier before the scores": (BARRIER + TO_SCORES, TO_SCORES),
    "no barrier before the values": (BARRIER + TO_VALUES, TO_VALUES),
    "no barrier before the sums": (BARRIER + TO_SUMS, TO_SUMS),
    "no barrier before the next tile": (BARRIER + "\n}", "}"),
    "keys past the last one": ("min(int(TILE), end - begin)", "int(TILE)"),
    "a block past the last key": ("min(key_count, (block + 1) * BLOCK)", "(block + 1) * BLOCK"),
    "hidden values": ("if (weight != 0.0f)", "if (true)"),
    "hidden keys": ("sees ? precise::exp(score - best[q]) : 0.0f", "precise::exp(score - best[q])"),
    "the key behind": ("key_count - length +", "key_count - length + 1 +"),
    "another head": ("QUERY(q) / length)", "QUERY(q) % HEADS)"),
    "not shrunk": ("sums[q][s] *= shrunk;", ""),
    "written by all": ("if (lane == 0)", ""),
}


class TestDenseProducts:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("rows", "columns"), [(13, 70), (8, 512), (1, 3)])
    def test_are_those_of_exact_arithmetic_and_read_the_weight_once(self, rows, columns, dtype):
        x, weight = normal(3, columns, dtype=dtype), normal(rows, columns, dtype=mx.bfloat16, seed=1)
        wanted, sizes = exact(x) @ exact(weight).T, np.abs(exact(x)) @ np.abs(exact(weight)).T
        bound = (columns / 32 + 8 + 5) * 2.0**-24 * sizes + UNIT[dtype] * np.abs(wanted) + SMALLEST[dtype]
        for order, schedule in ORDERS:
            y, report = ran(dense_launch(x, weight), order, schedule)
            assert (np.abs(exact(y) - wanted) <= bound).all()
            assert (report.reads["weight"][: weight.nbytes] == 1).all()

    @pytest.mark.some(3)
    @pytest.mark.parametrize("vectors", [2, 9, 16])
    @pytest.mark.parametrize("columns", [70, 512])
    def test_a_vector_has_the_same_bits_in_any_company(self, columns, vectors):
        x, weight = normal(1, vectors, columns), normal(13, columns, dtype=mx.float16, seed=1)
        y, _ = ran(dense_launch(x, weight))
        assert all(same_bits(ran(dense_launch(x[0, v], weight))[0], y[0, v]) for v in range(vectors))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "case",
    [
        Case((4,), 13, 96, 32),
        Case((3,), 13, 96, 32),
        Case((4, 4), 13, 192, bias=True),
        Case((2, 2, 4), 13, 192),
        *(Case(bits, 13, 85, bias=True, format="rowwise") for bits in (2, 6, 8)),
        Case(4, 13, 85, format="groupwise"),
        Case(5, 13, 85, format="codebook"),
        Case(3, 13, 85, bias=True, format="codebook-library"),
    ],
    ids=str,
)
@pytest.mark.parametrize("vectors", [3, 16])
def test_a_vector_has_the_same_bits_in_any_company(case, vectors):
    packed, x = problem(case), normal(vectors, case.columns, dtype=case.dtype, seed=2)
    best = dataclasses.replace(case, variant=None)

    def product(x: mx.array) -> mx.array:
        return ran(launch(best, dataclasses.replace(packed, x=x)))[0]

    y = product(x)
    assert all(same_bits(product(x[v : v + 1])[0], y[v]) for v in (0, vectors - 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traditional", [False, True])
def test_rotary_positions_are_exact_and_the_same_in_any_company(traditional, dtype):
    x = normal(2, 5, 3, 20, dtype=dtype).swapaxes(1, 2)  # with the strides of a projection
    frequencies = inverse_frequencies(16, 100.0)
    y, report = ran(rope_launch(x, frequencies, 30, traditional, 0.5))
    angles = (30 + np.arange(5))[:, None] * 0.5 * exact(frequencies)
    halves = (slice(0, 16, 2), slice(1, 16, 2)) if traditional else (slice(0, 8), slice(8, 16))
    wanted = exact(x)
    a, b = (exact(x)[..., half] for half in halves)
    wanted[..., halves[0]] = a * np.cos(angles) - b * np.sin(angles)
    wanted[..., halves[1]] = a * np.sin(angles) + b * np.cos(angles)
    # The angle, up to 15, is rounded three times; sine, cosine and the sum are rounded too.
    bound = (3 * 15 + 8) * 2.0**-24 * np.abs(exact(x)).max() + UNIT[dtype] * np.abs(wanted)
    assert (np.abs(exact(y) - wanted) <= bound).all()
    assert (report.reads["x"] == 1).all()
    for t in range(5):
        alone, _ = ran(rope_launch(x[:, :, t : t + 1], frequencies, 30 + t, traditional, 0.5))
        assert same_bits(alone, y[:, :, t : t + 1])


class TestAttention:
    @staticmethod
    def attend(queries, keys, values, mask, order: int = 0, schedule: int = 0) -> tuple[mx.array, Report]:
        parts, report = ran(parts_launch(queries, keys, values, 0.3, mask), order, schedule)
        return ran(join_launch(parts, queries.dtype), order, schedule)[0], report

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [("causal", mx.float32), ("causal", mx.bfloat16), ("some", mx.float16), ("all", mx.float32)],
        ids=str,
    )
    @pytest.mark.parametrize(("heads", "kv_heads", "length", "keys", "width"), [(4, 2, 5, 150, 24), (3, 3, 1, 3, 40)])
    def test_is_that_of_exact_arithmetic_and_reads_keys_and_values_once(
        self, heads, kv_heads, length, keys, width, kind, dtype
    ):
        q = normal(2, length, heads, width, dtype=dtype).swapaxes(1, 2)
        room = [normal(2, kv_heads, keys + 9, width, dtype=dtype, seed=seed) for seed in (1, 2)]  # like a cache
        k, v = (a[:, :, :keys] for a in room)
        seen, mask = masked(kind, length, keys)
        wanted, bound = attended(exact(q), exact(k), exact(v), seen, 0.3, dtype)
        for order, schedule in ORDERS:
            y, report = self.attend(q, k, v, mask, order, schedule)
            assert (np.abs(exact(y) - wanted) <= bound).all()
            for name, array in (("keys", k), ("values", v)):  # the room after them is not read
                assert report.reads[name].sum() == array.nbytes

    @pytest.mark.slow
    @pytest.mark.parametrize(("heads", "rows"), [(4, 2), (4, 3), (6, 8), (4, 16), (24, 16)])
    def test_a_query_has_the_same_bits_in_any_company(self, heads, rows):
        """For any keys after those that it sees, even NaN, and for every way of hiding them."""
        keys, width = 128 + (rows + 1) // 2, 16  # some of the queries see a second block
        q = normal(1, heads, rows, width)
        k, v = (normal(1, 2, keys, width, seed=seed) for seed in (1, 2))
        causal, _ = self.attend(q, k, v, "causal")
        seen = mx.arange(keys) <= mx.arange(keys - rows, keys)[:, None]
        masked, _ = self.attend(q, k, v, seen)
        assert same_bits(causal, masked)
        for row in (0, rows - 1):
            visible = keys - rows + row + 1
            one = q[:, :, row : row + 1]
            alone, _ = self.attend(one, k[:, :, :visible], v[:, :, :visible], None)
            assert same_bits(alone, causal[:, :, row : row + 1])
            behind = mx.where(mx.arange(keys)[:, None] < visible, 0.0, mx.nan)
            spoiled, _ = self.attend(one, k + behind, v + behind, seen[row : row + 1])
            assert same_bits(spoiled, alone)

    @pytest.mark.metal_mutations
    @pytest.mark.parametrize("name", ATTENTION)
    def test_a_mistake_is_noticed(self, name):
        q, k, v = normal(1, 4, 4, 16), normal(1, 2, 70, 16, seed=1), normal(1, 2, 70, 16, seed=2)
        v = mx.concatenate([v[:, :, :69], mx.full((1, 2, 1, 16), mx.nan)], 2)  # only the last query sees it
        made = parts_launch(q, k, v, 0.3, "causal")
        sound, broken = run_launch(made), run_launch(made, change=changer(*ATTENTION[name]))
        written = (broken.writes["out"] == 1).all()
        assert broken.error or not written or not np.array_equal(sound.out[0], broken.out[0], equal_nan=True)

    def test_a_query_that_sees_nothing_gets_zeros(self):
        q, k = normal(1, 1, 2, 16), normal(1, 1, 140, 16)
        y, _ = self.attend(q, k, k, mx.array([[False] * 140, [True] * 140]))
        assert (y[:, :, 0] == 0).all().item()
        assert (y[:, :, 1] != 0).all().item()


class TestWholeBlocks:
    """Norm, projections, positions, attention with a cache, norm, MLP and head: 1 row at a time, and several."""

    @staticmethod
    def steps(model, cache, rows: list[int]) -> mx.array:
        """The logits of one pass over these tokens after a copy of the cache."""
        return model(mx.array([rows]), cache=copy.deepcopy(cache))[0]

    def passes(self, gear: str, launches: list[Prepared], sizes: tuple[int, ...], dtype: str = "float32") -> list[bool]:
        """For each number of rows, whether one pass over them gives the bits of single-row passes."""
        gearbox = Gearbox(tiny_model(num_hidden_layers=1), "4,8,16", kernels="native", dtype=dtype)
        gearbox.shift(gear)
        cache = make_prompt_cache(gearbox.model)
        gearbox.model(mx.array([CONTEXT]))  # which compares each kernel once
        launches.clear()
        gearbox.model(mx.array([CONTEXT]), cache=cache)
        assert launches == []  # too many rows for our kernels
        alone, one_by_one = [], copy.deepcopy(cache)
        for token in ROWS[: max(sizes)]:
            alone.append(gearbox.model(mx.array([[token]]), cache=one_by_one)[0, 0])
        ours = {launch.spec.text for launch in launches}
        assert ours == {"dense" if gear == "high" else "matvec", "rope", "attention", "attention_join"}
        together = [self.steps(gearbox.model, cache, ROWS[:size]) for size in sizes]
        return [same_bits(logits, mx.stack(alone[: len(logits)])) for logits in together]

    @pytest.mark.slow
    @pytest.mark.parametrize(("gear", "dtype"), [("low", "float32"), ("mid", "bfloat16"), ("high", "bfloat16")])
    def test_a_row_has_the_same_bits_in_any_company(self, gear, dtype, launches):
        assert all(self.passes(gear, launches, (2, 3, 8, 16), dtype))
        assert {launch.spec.dtype for launch in launches if launch.spec.text == "attention"} == {getattr(mx, dtype)}

    @pytest.mark.metal_mutations
    @pytest.mark.parametrize("text", ORDER_BY_ROWS)
    def test_a_kernel_whose_order_depends_on_the_rows_is_noticed(self, text, launches, monkeypatch):
        gear, sound, dependent = ORDER_BY_ROWS[text]
        read = metal.source_text
        change = changer(sound, dependent)
        monkeypatch.setattr(metal, "source_text", lambda name: change(read(name)) if name == text else read(name))
        metal.build.cache_clear()
        try:
            assert self.passes(gear, launches, (3,)) == [False]
        finally:
            metal.build.cache_clear()
