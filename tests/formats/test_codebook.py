import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, heavy, layer_with, linear_layers, matrix, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_texts import assert_written, written
from mlx.utils import tree_flatten

from gearbx_mlx import Gearbox, GearbxError, Lossless
from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, get_format
from gearbx_mlx.formats.codebook import (
    DEFAULT_OPTIONS,
    LLOYD_STEP,
    ROUNDS,
    WORD_CODES,
    Codebook,
    Outliers,
    SortedRows,
    all_outliers,
    extract_outliers,
    lloyd,
    lloyd_round,
    nbytes,
    nearest_entries,
    outliers_of,
    pack_codebook_codes,
    row_bytes,
    unpack_codebook_codes,
)
from gearbx_mlx.formats.codebook_library import KERNEL_LIBRARY, CodebookLibrary

MODULES = {"codebook": codebook, "codebook-library": codebook_library}
CASES = [("codebook", bits) for bits in WORD_CODES] + [("codebook-library", bits) for bits in (2, 3, 4)]
seeds = st.integers(0, 2**32 - 1)
widths = st.one_of(st.integers(1, 9), st.integers(10, 300))


def error(made: mx.array, weight: mx.array) -> float:
    return (mx.square(made - weight).sum() / mx.square(weight).sum()).item()


class TestPacking:
    @settings(deadline=None)
    @given(st.sampled_from(list(WORD_CODES)), st.integers(1, 4), widths, seeds)
    def test_round_trip_is_exact(self, bits, rows, width, seed):
        codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, width)).astype(np.uint8)
        words = pack_codebook_codes(mx.array(codes), bits)
        assert words.dtype == WORD_CODES[bits][1]
        assert words.shape[-1] * words.dtype.size == row_bytes(width, bits)
        assert np.array_equal(np.array(unpack_codebook_codes(words, bits, width)), codes)

    @pytest.mark.parametrize(("bits", "held", "size"), [(2, 16, 32), (3, 10, 32), (4, 8, 32), (5, 3, 16), (6, 5, 32)])
    def test_words_match_table_3_3(self, bits, held, size):
        codes = [(7 * i + 3) % 2**bits for i in range(held)]
        word = np.array(pack_codebook_codes(mx.array(codes), bits))[0]
        assert word.nbytes * 8 == size
        assert int(word) == sum(code << i * bits for i, code in enumerate(codes))
        assert WORD_CODES[bits][0] == held


class TestOutliers:
    @settings(deadline=None)
    @given(st.integers(1, 12), widths, st.sampled_from([1.0, 1.5, 4.0]), seeds)
    def test_at_most_two_percent_and_the_furthest(self, rows, width, freedom, seed):
        values = np.random.default_rng(seed).standard_t(freedom, (rows, width)).astype(np.float32)
        mask = outliers_of(mx.array(values))
        distance = np.abs(values.astype(np.float64) - values.mean(dtype=np.float64))
        assert mask.sum() <= DEFAULT_OPTIONS.cap * values.size
        if mask.any():
            assert distance[mask].min() > 3 * values.std(dtype=np.float64) * (1 - 1e-4)
            assert distance[mask].min() >= np.sort(distance.ravel())[-mask.sum()] * (1 - 1e-5)

    def test_unbounded_outliers_exceed_three_sigma(self):
        values = np.array(matrix(64, 512))
        expected = np.abs(values - values.mean()) > 3 * values.std()
        assert np.array_equal(outliers_of(mx.array(values)), expected)
        assert 0.002 < expected.mean() < 0.0035

    @settings(deadline=None)
    @given(st.sampled_from([(5, 33), (1, 1), (3, 4, 40), (2, 3, 8)]), st.floats(0, 1), seeds)
    def test_outliers_are_restored_at_exact_positions(self, shape, share, seed):
        random = np.random.default_rng(seed)
        weight = mx.array(random.standard_normal(shape).astype(np.float16).astype(np.float32))
        mask = random.random(shape) < share * random.random(shape[:-1])[..., None]
        outliers = extract_outliers(weight, mask)
        assert outliers.count() == mask.sum()
        back = np.array(outliers.put_into(mx.full(shape, 9.0)))
        assert np.array_equal(back, np.where(mask, np.array(weight), 9.0))

    @pytest.mark.parametrize("name", MODULES)
    def test_outlier_of_half_precision_checkpoint_is_exact(self, name):
        weight = heavy(32, 256).astype(mx.float16)
        mask = all_outliers(weight)
        assert mask.any()
        made = codebook.decode(MODULES[name].encode(weight, 2), 2, 256)
        assert np.array_equal(np.array(made)[mask], np.array(weight.astype(mx.float32))[mask])
        assert not np.array_equal(np.array(made)[~mask], np.array(weight.astype(mx.float32))[~mask])

    def test_all_outliers_of_a_row_have_one_code(self):
        """A kernel takes back one value for all of them."""
        weight = heavy(64, 300)
        mask = all_outliers(weight)
        codes = np.array(unpack_codebook_codes(codebook.encode(weight, 4)["weight"], 4, 300))
        assert (mask.sum(axis=1) > 1).any()
        for row, outlying in zip(codes, mask):
            assert len(set(row[outlying])) <= 1

    def test_columns_beyond_16_bits_are_refused(self):
        for name in MODULES:
            assert get_format(name).fits(65536, 64) is None
            assert "65536" in get_format(name).fits(65537, 64)


class TestLloyd:
    @settings(deadline=None, max_examples=40)
    @given(st.integers(2, 5), st.integers(1, 200), st.booleans(), seeds)
    def test_the_error_never_rises(self, bits, width, plain, seed):
        values = np.random.default_rng(seed).standard_t(3, (3, width)).astype(np.float32)
        rows = SortedRows.of(mx.array(values), mx.zeros(values.shape, mx.bool_))
        entries = rows.quantiles(2**bits)
        last = math.inf
        for _ in range(12):
            table = np.array(entries).astype(np.float64)
            now = np.square(values[..., None] - table[:, None]).min(axis=-1).sum()
            assert now <= last * (1 + 1e-5) + 1e-9
            entries, last = lloyd_round(rows, entries, 1.0 if plain else LLOYD_STEP), now

    def test_a_round_is_lloyds(self):
        values = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
        left_out = np.random.default_rng(1).random((4, 100)) < 0.1
        rows = SortedRows.of(mx.array(values), mx.array(left_out))
        entries = rows.quantiles(8)
        moved = np.array(lloyd_round(rows, entries))
        for r in range(4):
            counted, before = values[r][~left_out[r]], np.array(entries[r])
            member = np.abs(counted[:, None] - before).argmin(axis=1)
            expected = [counted[member == k].mean() if (member == k).any() else before[k] for k in range(8)]
            assert np.allclose(moved[r], expected, atol=1e-6)

    def test_starts_at_quantiles_of_weighted_values(self):
        rows = SortedRows.of(mx.arange(20.0)[None], mx.arange(20)[None] >= 16)
        assert rows.quantiles(4).tolist() == [[2, 6, 10, 14]]

    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, 5), st.integers(1, 60), seeds)
    def test_codes_are_of_the_nearest_entries(self, bits, width, seed):
        random = np.random.default_rng(seed)
        table = np.sort(random.standard_normal((2, 2**bits)).astype(np.float32), axis=1)
        values = random.standard_normal((2, width)).astype(np.float32)
        codes = np.array(nearest_entries(mx.array(values), mx.array(table)))
        chosen = np.abs(values - np.take_along_axis(table, codes.astype(int), axis=1))
        assert np.allclose(chosen, np.abs(values[..., None] - table[:, None]).min(axis=-1), atol=1e-6)

    def test_longer_steps_converge_further_in_equal_rounds(self):
        weight = heavy(64, 4096)
        rows = SortedRows.of(weight, mx.array(outliers_of(weight)))
        plain = rows.quantiles(16)
        for _ in range(ROUNDS):
            plain = lloyd_round(rows, plain)

        def off(entries: mx.array) -> float:
            counts, sums = rows.cells(entries)
            return (counts * mx.square(entries) - 2 * sums * entries).sum().item()

        best = off(lloyd(rows, 4, 300))
        squares = mx.where(mx.array(outliers_of(weight)), 0, mx.square(weight)).sum().item()
        assert squares + off(lloyd(rows, 4)) < 0.93 * (squares + off(plain))
        assert squares + off(lloyd(rows, 4)) < 1.08 * (squares + best)


class TestCodebooks:
    @pytest.mark.parametrize(("bits", "cosine"), [(2, 0.939), (3, 0.983), (4, 0.995)])
    def test_gaussian_cosines_match_theory(self, bits, cosine):
        weight = matrix(128, 4096)
        arrays = codebook.encode(weight, bits)
        alone = codebook.fit(weight, mx.zeros(weight.shape, mx.bool_), bits)
        without = mx.take_along_axis(alone[0].astype(mx.float32), alone[1].astype(mx.uint32), axis=-1)
        for made, tolerance in ((without, 0.001), (codebook.decode(arrays, bits, 4096), 0.006)):
            products = (made * weight).sum(-1) / mx.linalg.norm(made, axis=-1) / mx.linalg.norm(weight, axis=-1)
            assert float(np.median(np.array(products))) == pytest.approx(cosine, abs=tolerance)

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("matrix", "below"), [(matrix, 0.20), (heavy, 0.40)])
    @pytest.mark.parametrize("bits", [3, 4])
    def test_error_is_far_below_affine_at_equal_bits(self, matrix, below, bits):
        weight = matrix(256, 4096)
        arrays = codebook.encode(weight, bits)
        curve = {}
        for width in (2, 3, 4, 5):
            for group in (32, 64, 128):
                words, scales, biases = mx.quantize(weight.astype(mx.float16), group, width)
                made = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group, width)
                curve[width + 32 / group] = error(made, weight)
        points = sorted(curve)
        effective = 8 * nbytes(arrays) / weight.size
        affine = math.exp(np.interp(effective, points, [math.log(curve[p]) for p in points]))
        assert error(codebook.decode(arrays, bits, 4096), weight) < (1 - below) * affine

    @pytest.mark.parametrize("bits", codebook_library.LIBRARY_BITS)
    def test_library_error_is_below_row_codebooks(self, bits):
        weight = heavy(256, 1024)
        made = {name: error(codebook.decode(m.encode(weight, bits), bits, 1024), weight) for name, m in MODULES.items()}
        assert made["codebook-library"] < made["codebook"]

    def test_groups_get_codebook_of_least_error(self):
        chosen, few = np.random.default_rng(3), np.array([[-1.0, 1.0], [-3.0, 0.5], [0.25, 2.0]])
        groups, entries, out = np.arange(60)[:, None], chosen.integers(0, 2, (60, 128)), chosen.random((60, 128)) < 0.6
        z = few[(groups + out) % 3, entries] + chosen.normal(0, 0.1, out.shape)  # outliers are of another codebook
        z, outlying = mx.array(z, mx.float32), mx.array(out)
        library = mx.array(few, mx.float16)
        off = mx.abs(z[:, :, None, None] - library.astype(mx.float32)).min(axis=-1)
        errors = mx.where(outlying[:, :, None], 0, mx.square(off)).sum(axis=1)
        found = codebook_library.choose_entries(z, outlying, library)
        assert found.tolist() == errors.argmin(axis=-1).tolist() == [0, 1, 2] * 20

    def test_library_group_costs_0_31_bits_per_weight(self):
        arrays = codebook_library.encode(matrix(64, 1024), 4)
        assert arrays["library"].shape == (KERNEL_LIBRARY, 16)
        beside = sum(arrays[name].nbytes for name in ("entries", "scales", "midpoints"))
        assert 8 * beside / (64 * 1024) == 0.3125
        assert 8 * arrays["weight"].nbytes / (64 * 1024) == 4

    @pytest.mark.some(13)
    @pytest.mark.parametrize(("name", "bits"), CASES)
    @pytest.mark.parametrize("shape", [(1, 1), (5, 37), (1, 4), (3, 130), (2, 4, 33)])
    def test_any_shape_is_decoded(self, name, bits, shape):
        weight = heavy(*shape)
        made = codebook.decode(MODULES[name].encode(weight, bits), bits, shape[-1])
        assert made.shape == shape
        assert mx.abs(made - weight).max().item() <= mx.abs(weight).max().item() * 1.01

    @pytest.mark.parametrize(("name", "bits"), CASES)
    def test_weights_of_few_values_are_kept(self, name, bits):
        values = mx.array([-0.5, 0.25, 0.25, 1.0])
        weight = values[(mx.arange(256) * 7 // 3 % 4)][None] * mx.ones((8, 1))
        constant = mx.stack([mx.zeros(256), mx.full(256, 0.125)])
        for rows, most in ((weight, 2e-3), (constant, 0.0)):
            made = codebook.decode(MODULES[name].encode(rows, bits), bits, 256)
            assert mx.abs(made - rows).max().item() <= most


class TestModules:
    @pytest.mark.parametrize(("name", "bits"), CASES)
    def test_bytes_read_match_arrays(self, name, bits):
        module = get_format(name).modules(layer_with(heavy(64, 384)), bits, (bits,), 64, mx.float32)[bits]
        assert module.bytes_read == sum(a.nbytes for _, a in tree_flatten(module.parameters()))
        share = int(outliers_of(heavy(64, 384)).sum()) / (64 * 384)
        assert get_format(name).stored_bytes((64, 384), bits, share) == module.bytes_read

    def test_padding_of_outlier_lists_is_not_read(self):
        weight = matrix(4, 16, 64)
        weight[2, 3, :10] = 5.0
        arrays = codebook.encode(weight, 2)
        length, count = arrays["outliers"].shape[-1], Outliers.of(arrays).count()
        assert count < 4 * length
        assert sum(a.nbytes for a in arrays.values()) - nbytes(arrays) == 4 * (4 * length - count)


class TestOptions:
    def test_format_name_round_trips_options(self):
        options = CodebookOptions(sigma=2.5, cap=0.05, rounds=7, library=8, group=64)
        format = CodebookLibrary(options=options)
        assert format.name == "codebook-library:cap=0.05,group=64,library=8,rounds=7,sigma=2.5"
        assert get_format(format.name).options == options
        assert Codebook().name == "codebook"
        with pytest.raises(GearbxError, match=r"no library or group, got group=64"):
            get_format("codebook:group=64")

    @pytest.mark.parametrize(
        ("sigma", "cap", "share"), [(2.0, 0.5, 0.0455), (2.0, 0.01, 0.01), (4.0, 0.02, 0.0001), (3, 0, 0)]
    )
    def test_sigma_and_cap_decide_the_outliers(self, sigma, cap, share):
        options = CodebookOptions(sigma=sigma, cap=cap)
        found = outliers_of(mx.array(np.random.default_rng(1).standard_normal((256, 1024)).astype(np.float32)), options)
        assert found.mean() == pytest.approx(share, abs=5e-4)
        assert options.gaussian_share == pytest.approx(share, abs=5e-5)

    @pytest.mark.parametrize(("library", "group"), [(1, 128), (8, 32), (64, 256)])
    def test_other_libraries_and_groups(self, library, group):
        weight, format = heavy(40, 384), get_format(f"codebook-library:library={library},group={group}")
        arrays = format.encode(weight, 3)
        assert arrays["library"].shape == (library, 8)
        assert arrays["scales"].shape == (40, -(-384 // group))
        assert format.stored_bytes(weight.shape, 3, all_outliers(weight).mean()) == codebook.nbytes(arrays)
        stored = format.stored_arrays(weight.shape, 3, (3,), 64, mx.float16)
        assert all(len(a.shape) == arrays[n].ndim for n, a in stored.items())
        assert error(codebook.decode(arrays, 3, 384), weight) < 0.05
        assert not format.native


class TestGearbox:
    def test_floored_layer_gets_bits_outside_ladder(self):
        def floor(path, module):
            return {"bits": 5} if "q_proj" in path else True

        gearbox = Gearbox(tiny_model(), "2,16", format="codebook", manage=floor)
        gearbox.shift("low")
        assert gearbox.model.layers[0].self_attn.q_proj.bits == 5
        assert gearbox.model.layers[0].self_attn.k_proj.bits == 2
        layer = next(each for each in gearbox.layers if "q_proj" in each.path)
        assert Gearbox(tiny_model(), "2,16", manage=floor).bits_of(layer, gearbox.ladder[0]) == 16

    def test_outliers_are_counted_once_a_gear_is_made(self):
        model = tiny_model()
        for module in linear_layers(model).values():
            module.weight = heavy(*module.weight.shape)
        gearbox = Gearbox(model, "3,16", format="codebook")
        low = gearbox.ladder[0]
        expected = gearbox.bits_per_weight(low), gearbox.weight_bytes_per_token(low)
        gearbox.shift(low)
        assert gearbox.bits_per_weight(low) > expected[0]
        assert gearbox.weight_bytes_per_token(low) > expected[1]


@pytest.mark.some(1)
@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("format", MODULES)
def test_drafts_in_lossless_mode(format, kernels):
    model = tiny_model()
    gearbox = Gearbox(model, "4,16", format=format, kernels=kernels)
    prompt = PROMPT[0].tolist()
    assert_written(written(gearbox, prompt, mode=Lossless(draft_length=3)), written(gearbox, prompt))
    gearbox.shift("low")
    assert not mx.array_equal(gearbox.model(PROMPT), tiny_model()(PROMPT)).item()
