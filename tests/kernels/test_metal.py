"""Tests of the Metal kernels without clang: selection, bad input, packaging."""

import gc
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_on_cpu.exact_cases import encode, rounded

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, groupwise, rowwise
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.bit_planes import Planes, planes_matmul
from gearbx_mlx.kernels.exact import ExactMatrix
from gearbx_mlx.kernels.metal import Launch, choose_variant, fitting_variants
from gearbx_mlx.kernels.metal_exact import decode_launch, exact_launch
from gearbx_mlx.kernels.metal_products import (
    codebook_launch,
    dense_launch,
    planes_launch,
    symmetric_launch,
    takes_dense,
)
from gearbx_mlx.kernels.products import uses_order

ROOT = Path(__file__).parents[2]


def arguments(rows=8, columns=128, bits=4, dtype=mx.float16, vectors=1):
    weight = mx.random.normal((rows, columns)).astype(dtype)
    words, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    x = mx.random.normal((vectors, columns)).astype(dtype)
    return {"x": x} | Planes([words], scales, [biases], (bits,), 64)._asdict()


def launch_planes(x, bias=None, variant=None, **planes):
    return planes_launch(x, Planes(**planes), bias, variant)


def rowwise_arguments(rows=8, width=21, bits=6, quantize=rowwise.quantize):
    codes, scales = quantize(mx.random.normal((rows, width)), bits)
    weight = rowwise.pack_symmetric_codes(codes, bits)
    return {"x": mx.random.normal((1, width)), "weight": weight, "scales": scales, "bits": bits, "width": width}


def groupwise_arguments(width=70):
    return rowwise_arguments(width=width, bits=4, quantize=lambda weight, bits: groupwise.quantize(weight))


CODEBOOKS = {"codebook": codebook, "library": codebook_library}


def codebook_arguments(kind="codebook", rows=8, width=70, bits=4):
    arrays = CODEBOOKS[kind].encode(mx.random.normal((rows, width)), bits, CodebookOptions(rounds=2))
    return {"x": mx.random.normal((1, width)), "arrays": arrays, "bits": bits}


def exact_arguments(rows=8, columns=128, group=64, vectors=1) -> dict:
    weight = rounded(np.random.default_rng(0).standard_normal((rows, columns)) * 0.1)
    return {"x": mx.zeros((vectors, columns), mx.bfloat16)} | encode(weight, group).arguments()


def launch_exact(x, bias=None, **matrix) -> Launch:
    return exact_launch(x, ExactMatrix(**matrix), bias)


def decode_exact(chosen=None, x=None, **matrix) -> Launch:
    return decode_launch(ExactMatrix(**matrix), chosen)


def test_missing_metal_is_explained():
    assert not metal.available()
    with pytest.raises(GearbxError, match=r"^Metal.*$"):
        launch_planes(**arguments()).run()


def test_import_builds_no_kernels():
    program = "import mlx.core as mx; mx.fast = None; import gearbx_mlx.kernels.metal_products"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("variant", metal.VARIANTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_on_metal_itself(bits, variant):
    given = arguments(bits=bits, rows=37, columns=576, dtype=mx.float32, vectors=3)
    y = launch_planes(**given, variant=variant).run()
    assert mx.allclose(y, planes_matmul(given.pop("x"), Planes(**given)), atol=1e-3)


def test_variant_is_chosen_by_shape():
    assert choose_variant(4, 8).name == "registers"
    assert choose_variant(4, 9).name == "device"
    assert choose_variant(4, 2, "threadgroup").rows == 2
    assert choose_variant(2, 1, "threadgroup").rows == 1
    for columns, vectors, dtype, fits in (
        (6144, 2, mx.float16, True),
        (6144, 1, mx.float32, True),
        (6176, 1, mx.float16, False),
        (4096, 4, mx.float16, False),
        (6144, 2, mx.float32, False),
    ):
        names = fitting_variants(metal.VARIANTS, columns, vectors, dtype)
        assert names == ["registers", *(["threadgroup"] if fits else []), "device"]


def launch_codebook(arrays, **given):
    """The launch, given arrays by their names beside the others."""
    named = {name: given.pop(name) for name in [*given] if name in arrays}
    return codebook_launch(arrays=arrays | named, **given)


OF_PLANES = (launch_planes, arguments)
OF_ROWS = (symmetric_launch, rowwise_arguments)
OF_GROUPS = (symmetric_launch, groupwise_arguments)
OF_CODEBOOK = (launch_codebook, codebook_arguments)
OF_LIBRARY = (launch_codebook, partial(codebook_arguments, "library"))
OF_DENSE = (dense_launch, lambda: {"x": mx.zeros((1, 8)), "weight": mx.zeros((3, 8))})
OF_EXACT = (launch_exact, exact_arguments)
OF_DECODED = (decode_exact, exact_arguments)
WRONG_PACKED = [
    ("group_size", 48, "group size: must be 32, 64 or 128, got 48"),
    ("codes", mx.zeros((8, 12), mx.uint32), "codes of exact weights"),
    ("codes", mx.zeros((8, 16), mx.int32), "codes of exact weights"),
    ("scales", mx.zeros((8,), mx.uint16), "must have rows"),
    ("scales", mx.zeros((8, 2), mx.bfloat16), "scales of exact weights: must be .*uint16, got .*bfloat16"),
    ("biases", mx.zeros((8, 3), mx.uint16), "biases of exact weights"),
    ("low", mx.zeros((8, 20), mx.uint32), "low of exact weights"),
    ("high", mx.zeros((0,), mx.uint8), "high of exact weights: must have 1 to .* bytes, got 0"),
    ("high", mx.zeros((3, 3), mx.uint8), "high of exact weights"),
    ("offsets", mx.zeros((8,), mx.uint32), "offsets of exact weights"),
    ("offsets", mx.zeros((9,), mx.int64), "offsets of exact weights"),
]
DO_NOT_FIT = [
    *((kind, *wrong) for kind in (OF_EXACT, OF_DECODED) for wrong in WRONG_PACKED),
    (OF_EXACT, "x", mx.zeros((1, 128), mx.int32), "activations: must be float16, .* got mlx.core.int32"),
    (OF_EXACT, "x", mx.zeros((1, 64)), "weights have 128 columns"),
    *((OF_EXACT, "x", mx.zeros((vectors, 128)), "must be 1 to 16 vectors") for vectors in (0, 17)),
    (OF_EXACT, "bias", mx.zeros((7,)), "output bias"),
    (OF_DENSE, "x", mx.zeros((17, 8)), "must be 1 to 16 vectors"),
    (OF_DENSE, "x", mx.zeros((0, 8)), "must be 1 to 16 vectors"),
    (OF_DENSE, "x", mx.zeros((1, 8), mx.int32), "activations: must be float16"),
    (OF_DENSE, "weight", mx.zeros((3, 9)), "weights have 9 columns"),
    (OF_DENSE, "weight", mx.zeros((8,)), "weights: must be a matrix"),
    (OF_DENSE, "weight", mx.zeros((3, 8), mx.int8), "weights: must be a matrix of float16"),
    (OF_PLANES, "x", mx.zeros((1, 128), mx.int32), "activations: must be"),
    (OF_PLANES, "x", mx.zeros((1, 64), mx.float16), "weights have 128 columns"),
    (OF_PLANES, "x", mx.zeros((17, 128), mx.float16), "must be 1 to 16 vectors"),
    (OF_PLANES, "x", mx.zeros((0, 128), mx.float16), "must be 1 to 16 vectors"),
    (OF_PLANES, "group_size", 48, "group size: .*, got 48"),
    (OF_PLANES, "widths", (9,), "9 bits"),
    (OF_PLANES, "widths", (), "bits"),
    (OF_PLANES, "widths", (4, 4), "must be 2 weights"),
    (OF_PLANES, "widths", (3,), "plane 0"),
    (OF_PLANES, "biases", [mx.zeros((8, 3), mx.float16)], "biases of plane 0"),
    (OF_PLANES, "bias", mx.zeros((7,), mx.float16), "output bias"),
    (OF_ROWS, "x", mx.zeros((1, 20)), "weights have 21 columns"),
    (OF_ROWS, "x", mx.zeros((17, 21)), "must be 1 to 16 vectors"),
    (OF_ROWS, "bits", 5, "8, 6, 4 or 2 bits, got 5"),
    (OF_ROWS, "bits", 8, "must be rows of 21 8-bit codes"),
    (OF_ROWS, "width", 0, "must be rows of 0"),
    (OF_ROWS, "width", 22, "weights have 22 columns"),
    (OF_ROWS, "width", 200, "must be rows of 200"),
    (OF_ROWS, "weight", mx.zeros((8, 24), mx.uint8), "must be rows of 21"),
    (OF_ROWS, "weight", mx.zeros((8, 512), mx.uint8), "must be rows of 21"),
    (OF_ROWS, "weight", mx.zeros((1, 8, 32), mx.uint8), "must be rows of 21"),
    (OF_ROWS, "scales", mx.zeros((7,)), "must have 8 rows"),
    (OF_ROWS, "bias", mx.zeros((7,)), "output bias"),
    (OF_GROUPS, "x", mx.zeros((1, 71)), "weights have 70 columns"),
    (OF_GROUPS, "width", 100, "must be rows of 100"),
    (OF_GROUPS, "width", 64, "must have 8 rows of 2 groups"),
    (OF_GROUPS, "weight", mx.zeros((8, 48), mx.int8), "must be rows of 70"),
    (OF_GROUPS, "scales", mx.zeros((8, 2)), "must have 8 rows of 3 groups"),
    (OF_CODEBOOK, "x", mx.zeros((1, 80)), "weight: must be"),
    (OF_CODEBOOK, "x", mx.zeros((17, 70)), "must be 1 to 16 vectors"),
    (OF_CODEBOOK, "bits", 7, "2 to 6 bits, got 7"),
    (OF_CODEBOOK, "bits", 3, "weight: must be"),
    (OF_CODEBOOK, "codebook", mx.zeros((8, 8), mx.float16), "codebook: must be"),
    (OF_CODEBOOK, "codebook", mx.zeros((8, 16)), "codebook: must be"),
    (OF_CODEBOOK, "outliers", mx.zeros((3, 1), mx.float16), "must be one list"),
    (OF_CODEBOOK, "outlier_columns", mx.zeros((99,), mx.uint16), "outlier_columns: must be"),
    (OF_CODEBOOK, "outlier_offsets", mx.zeros((8,), mx.uint32), "outlier_offsets: must be"),
    (OF_CODEBOOK, "bias", mx.zeros((7,)), "output bias"),
    (OF_LIBRARY, "bits", 5, "2 to 4 bits, got 5"),
    (OF_LIBRARY, "x", mx.zeros((1, 200)), "weight: must be"),
    (OF_LIBRARY, "library", mx.zeros((31, 16), mx.float16), "library: must be"),
    (OF_LIBRARY, "entries", mx.zeros((8, 1), mx.int8), "entries: must be"),
    (OF_LIBRARY, "scales", mx.zeros((8, 2), mx.float16), "scales: must be"),
]


@pytest.mark.parametrize(("kind", "name", "value", "said"), DO_NOT_FIT)
def test_mismatched_arguments_are_refused(kind, name, value, said):
    launch, given = kind
    with pytest.raises(GearbxError, match=said):
        launch(**given() | {name: value})


def test_no_rows_are_no_launch(monkeypatch):
    monkeypatch.setattr(metal, "available", lambda: True)
    given = rowwise_arguments() | {"weight": mx.zeros((0, 16), mx.uint8), "scales": mx.zeros((0,))}
    assert symmetric_launch(**given).run().shape == (1, 0)


def test_names_are_unique():
    """MLX keeps compiled kernels by name: it would confuse two texts of one name."""
    launches = [
        launch_planes(**arguments(bits=bits, vectors=vectors, columns=columns), variant=variant)
        for bits in (2, 4, 8)
        for vectors in (1, 2, 3)
        for columns in (128, 256)
        for variant in metal.VARIANTS
    ]
    launches += [
        symmetric_launch(**rowwise_arguments(bits=bits, width=width), variant=variant)
        for bits in rowwise.Q_MAX
        for width in (21, 32)
        for variant in metal.VARIANTS
    ]
    launches += [symmetric_launch(**groupwise_arguments(width=width)) for width in (70, 80)]
    launches += [
        codebook_launch(**codebook_arguments(kind, bits=bits, width=width))
        for kind in CODEBOOKS
        for bits in (2, 3, 4)
        for width in (48, 53)
    ]
    launches += [decode_exact(**exact_arguments(group=group)) for group in (32, 64, 128)]
    launches += [
        launch_exact(**exact_arguments(group=group, vectors=vectors), bias=bias)
        for group in (32, 64, 128)
        for vectors in (1, 2, 16)
        for bias in (None, mx.zeros((8,)))
    ]
    specs = [launch.prepared.spec for launch in launches]
    texts = {(spec.header, *spec.input_names): spec.name for spec in specs}
    assert len(texts) == len(set(texts.values())) == (27 + 9) + 24 + 2 + 11 + 3 + 18  # 9: staged, of other widths


@pytest.mark.processes
def test_wheel_contains_the_kernels(tmp_path):
    names = ["gearbx_mlx", "metal", "pyproject.toml", "setup.py", "README.md", "LICENSE"]
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in (ROOT / name for name in names):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tree / path.name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    packed = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    kernels = {f"gearbx_mlx/metal/{file.name}" for file in (ROOT / "metal").glob("*.metal")}
    code = {str(file.relative_to(ROOT)) for file in (ROOT / "gearbx_mlx").rglob("*.py")}
    assert len(kernels) == len([*metal.metal_folder().glob("*.metal")])
    assert kernels | code <= packed

    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path / "installed")
    program = "from gearbx_mlx.kernels.metal import source_text as t; print(len(t('matvec')) and len(t('codes')))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path / "installed")


def arrays_of(found, depth: int = 4) -> list[mx.array]:
    """The arrays that an object keeps, directly or through other objects."""
    if isinstance(found, mx.array):
        return [found]
    kept = gc.get_referents(found) if depth and not isinstance(found, type) else []
    return [array for each in kept for array in arrays_of(each, depth - 1)]


@pytest.mark.parametrize("launch", [launch_planes(**arguments()), symmetric_launch(**rowwise_arguments())])
def test_prepared_calls_keep_no_weights(launch):
    """Otherwise an offloaded gear would stay in memory."""
    assert {id(array) for array in launch.inputs} <= {id(array) for array in arrays_of(launch)}
    assert [array.tolist()[:2] for array in arrays_of(launch.prepared)] == [[8, launch.inputs[0].shape[-1]]]


def test_a_small_array_is_padded_and_no_other():
    launch = symmetric_launch(**rowwise_arguments(rows=3))
    complete = launch.prepared.completed(launch.inputs)
    assert [array.shape for array in complete] == [(1, 21), (3, 32), (8,), (3,)]
    assert complete[2].tolist()[:3] == launch.inputs[2].tolist()


@pytest.mark.usefixtures("on_metal")
def test_exact_weights_on_metal_itself():
    given = exact_arguments(rows=37, columns=1152, vectors=16)
    given["x"] = mx.random.normal((16, 1152))
    weight = decode_exact(**given).run()
    original = rounded(np.random.default_rng(0).standard_normal((37, 1152)) * 0.1)
    assert (np.array(weight.view(mx.uint16)) == original).all()
    y = launch_exact(**given).run()
    assert mx.allclose(y, given["x"] @ weight.T.astype(mx.float32), atol=1e-3)
    for first, count in ((0, 1), (15, 1), (3, 2), (5, 8)):
        some = launch_exact(**given | {"x": given["x"][first : first + count]}).run()
        assert mx.array_equal(some, y[first : first + count])


def test_stacked_experts_are_decoded_and_not_multiplied():
    given = exact_arguments()
    for name in ("codes", "scales", "biases", "low"):
        given[name] = given[name].reshape(2, 4, -1)
    assert decode_exact(**given).prepared.shape == (2, 4, 128)
    assert decode_exact(mx.array([4, 1]), **given).prepared.shape == (2, 128)
    x = given.pop("x")
    with pytest.raises(GearbxError, match="must belong to one matrix"):
        exact_launch(x, ExactMatrix(**given))


def test_dense_products_take_dtypes_and_16_vectors():
    weight = mx.zeros((3, 8), mx.bfloat16)
    assert all(takes_dense(mx.zeros((4, 4, 8), dtype), weight) for dtype in (mx.float16, mx.bfloat16, mx.float32))
    assert dense_launch(mx.zeros((4, 4, 8)), weight).prepared.shape == (4, 4, 3)
    assert not takes_dense(mx.zeros((4, 5, 8)), weight)


def test_experts_of_verification_multiply_separately_on_metal(monkeypatch):
    few, many = mx.zeros((16 * 10,), mx.uint32), mx.zeros((512 * 8,), mx.uint32)
    monkeypatch.setattr(metal, "available", lambda: False)
    assert [uses_order(few, is_sorted) for is_sorted in (True, False)] == [True, False]
    monkeypatch.setattr(metal, "available", lambda: True)
    assert [uses_order(few, True), uses_order(many, True), uses_order(many, False)] == [False, True, False]
