"""Tests of the Metal kernels without clang: selection, bad input, packaging."""

import gc
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, groupwise, rowwise
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.bit_planes import Planes, planes_matmul
from gearbx_mlx.kernels.metal import available, choose_variant
from gearbx_mlx.kernels.metal_products import (
    codebook_launch,
    planes_launch,
    symmetric_launch,
)

ROOT = Path(__file__).parents[2]
needs_metal = pytest.mark.usefixtures("on_metal")


def arguments(rows=8, columns=128, bits=4, dtype=mx.float16, vectors=1):
    weight = mx.random.normal((rows, columns)).astype(dtype)
    words, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    return {
        "x": mx.random.normal((vectors, columns)).astype(dtype),
        "weights": [words],
        "scales": scales,
        "biases": [biases],
        "widths": (bits,),
        "group_size": 64,
    }


def launch_planes(x, bias=None, variant=None, **planes):
    return planes_launch(x, Planes(**planes), bias, variant)


def rowwise_arguments(rows=8, width=21, bits=6):
    codes, scales = rowwise.quantize(mx.random.normal((rows, width)), bits)
    weight = rowwise.pack_symmetric_codes(codes, bits)
    return {"x": mx.random.normal((1, width)), "weight": weight, "scales": scales, "bits": bits, "width": width}


def groupwise_arguments(rows=8, width=70):
    codes, scales = groupwise.quantize(mx.random.normal((rows, width)))
    return {
        "x": mx.random.normal((1, width)),
        "weight": rowwise.pack_symmetric_codes(codes, 4),
        "scales": scales,
        "bits": 4,
        "width": width,
    }


CODEBOOKS = {"codebook": codebook, "library": codebook_library}


def codebook_arguments(kind="codebook", rows=8, width=70, bits=4):
    arrays = CODEBOOKS[kind].encode(mx.random.normal((rows, width)), bits, CodebookOptions(rounds=2))
    return {"x": mx.random.normal((1, width)), "arrays": arrays, "bits": bits}


def test_without_metal_one_line_says_why():
    assert not available()
    with pytest.raises(GearbxError, match=r"^Metal.*$"):
        launch_planes(**arguments()).run()


def test_nothing_is_built_at_import():
    program = "import mlx.core as mx; mx.fast = None; import gearbx_mlx.kernels.metal_products"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@needs_metal
@pytest.mark.parametrize("variant", metal.VARIANTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_on_metal_itself(bits, variant):
    given = arguments(bits=bits, rows=37, columns=576, dtype=mx.float32, vectors=3)
    y = launch_planes(**given, variant=variant).run()
    assert mx.allclose(y, planes_matmul(given["x"], Planes(*(given[name] for name in Planes._fields))), atol=1e-3)


@needs_metal
@pytest.mark.parametrize("variant", metal.VARIANTS)
@pytest.mark.parametrize("width", [533, 576])
def test_other_formats_on_metal_itself(width, variant):
    for bits in rowwise.Q_MAX:
        given = rowwise_arguments(37, width, bits)
        weight = rowwise.dequantize(rowwise.unpack_symmetric_codes(given["weight"], bits, width), given["scales"])
        assert mx.allclose(symmetric_launch(**given, variant=variant).run(), given["x"] @ weight.T, atol=1e-3)
    given = groupwise_arguments(37, width)
    codes = rowwise.unpack_symmetric_codes(given["weight"], 4, given["scales"].shape[1] * groupwise.GROUP)
    weight = groupwise.dequantize(codes, given["scales"], width)
    assert mx.allclose(symmetric_launch(**given, variant=variant).run(), given["x"] @ weight.T, atol=1e-3)
    for kind in CODEBOOKS:
        for bits in (2, 3, 4):
            given = codebook_arguments(kind, 37, width, bits)
            weight = codebook.decode(given["arrays"], bits, width)
            assert mx.allclose(codebook_launch(**given, variant=variant).run(), given["x"] @ weight.T, atol=1e-3)


def test_selection():
    assert choose_variant(4, 4096, 8, mx.float16).name == "registers"
    assert choose_variant(4, 4096, 9, mx.float16).name == "device"
    assert choose_variant(4, 6144, 2, mx.float16, "threadgroup").rows == 2
    assert choose_variant(2, 6144, 1, mx.float32, "threadgroup").rows == 1
    for columns, vectors, dtype in ((6176, 1, mx.float16), (4096, 4, mx.float16), (6144, 2, mx.float32)):
        with pytest.raises(GearbxError, match="threadgroup memory"):
            choose_variant(4, columns, vectors, dtype, "threadgroup")
    with pytest.raises(GearbxError, match="'shared' is none of registers"):
        choose_variant(4, 4096, 1, mx.float16, "shared")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": mx.zeros((1, 128), mx.int32)}, "activations of"),
        ({"x": mx.zeros((1, 64), mx.float16)}, "do not fit weights of 128 columns"),
        ({"x": mx.zeros((17, 128), mx.float16)}, "not 1 to 16 vectors"),
        ({"x": mx.zeros((0, 128), mx.float16)}, "not 1 to 16 vectors"),
        ({"group_size": 48}, "group size 48"),
        ({"widths": (9,)}, "9 bits"),
        ({"widths": ()}, "bits"),
        ({"widths": (4, 4)}, "as many weights"),
        ({"widths": (3,)}, "plane 0"),
        ({"biases": [mx.zeros((8, 3), mx.float16)]}, "biases of plane 0"),
        ({"bias": mx.zeros((7,), mx.float16)}, "output bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_arguments_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(GearbxError, match=said):
        launch_planes(**arguments() | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": mx.zeros((1, 20))}, "do not fit weights of 21 columns"),
        ({"x": mx.zeros((17, 21))}, "not 1 to 16 vectors"),
        ({"bits": 5}, "5 bits are none of 8, 6, 4, 2"),
        ({"bits": 8}, "not rows of 21 8-bit codes"),
        ({"width": 0}, "not rows of 0"),
        ({"width": 22}, "do not fit weights of 22 columns"),
        ({"width": 200}, "not rows of 200"),
        ({"weight": mx.zeros((8, 24), mx.uint8)}, "not rows of 21"),
        ({"weight": mx.zeros((8, 512), mx.uint8)}, "not rows of 21"),
        ({"weight": mx.zeros((1, 8, 32), mx.uint8)}, "not rows of 21"),
        ({"scales": mx.zeros((7,))}, "do not fit 8 rows"),
        ({"bias": mx.zeros((7,))}, "output bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_rowwise_arguments_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(GearbxError, match=said):
        symmetric_launch(**rowwise_arguments() | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": mx.zeros((1, 71))}, "do not fit weights of 70 columns"),
        ({"width": 100}, "not rows of 100"),
        ({"width": 64}, "do not fit 8 rows of 2 groups"),
        ({"weight": mx.zeros((8, 48), mx.int8)}, "not rows of 70"),
        ({"scales": mx.zeros((8, 2))}, "do not fit 8 rows of 3 groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_groupwise_arguments_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(GearbxError, match=said):
        symmetric_launch(**groupwise_arguments() | changed)


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("codebook", {"x": mx.zeros((1, 80))}, "weight is"),
        ("codebook", {"x": mx.zeros((17, 70))}, "not 1 to 16 vectors"),
        ("codebook", {"bits": 7}, "7 bits are none of 2 to 6"),
        ("codebook", {"bits": 3}, "weight is"),
        ("codebook", {"codebook": mx.zeros((8, 8), mx.float16)}, "codebook is"),
        ("codebook", {"codebook": mx.zeros((8, 16))}, "codebook is"),
        ("codebook", {"outliers": mx.zeros((3, 1), mx.float16)}, "not a list"),
        ("codebook", {"outlier_columns": mx.zeros((99,), mx.uint16)}, "outlier_columns is"),
        ("codebook", {"outlier_offsets": mx.zeros((8,), mx.uint32)}, "outlier_offsets is"),
        ("codebook", {"bias": mx.zeros((7,))}, "output bias"),
        ("library", {"bits": 5}, "5 bits are none of 2, 3, 4"),
        ("library", {"x": mx.zeros((1, 200))}, "weight is"),
        ("library", {"library": mx.zeros((31, 16), mx.float16)}, "library is"),
        ("library", {"entries": mx.zeros((8, 1), mx.int8)}, "entries is"),
        ("library", {"scales": mx.zeros((8, 2), mx.float16)}, "scales is"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_codebook_arguments_that_do_not_fit_are_refused(kind, changed, said):
    given = codebook_arguments(kind)
    of_arrays = {name: changed[name] for name in changed if name in given["arrays"]}
    others = {name: changed[name] for name in changed if name not in of_arrays}
    with pytest.raises(GearbxError, match=said):
        codebook_launch(**given | {"arrays": given["arrays"] | of_arrays} | others)


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
    texts = {launch.spec.name: launch.spec.header for launch in launches}
    assert len(texts) == len(set(texts.values())) == (27 + 9) + 24 + 2 + 11  # 9: staged activations of other widths


def test_shape_of_the_result_is_that_of_the_activations():
    given = arguments()
    given["x"] = mx.zeros((2, 1, 128), mx.float16)
    assert launch_planes(**given).shape == (2, 1, 8)


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
    assert len(kernels) == 9
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
def test_what_is_prepared_keeps_no_weights(launch):
    """Otherwise an offloaded gear would stay in memory."""
    assert {id(array) for array in launch.inputs} <= {id(array) for array in arrays_of(launch)}
    assert [array.tolist()[:2] for array in arrays_of(launch.prepared)] == [[8, launch.inputs[0].shape[-1]]]


def test_a_prepared_launch_takes_other_arrays_and_writes_its_text_once(monkeypatch):
    built, called = [], []

    def kernel(**made):
        built.append(made)
        return lambda inputs, **options: called.append((inputs, options)) or [mx.zeros(options["output_shapes"][0])]

    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", kernel)
    metal.build.cache_clear()
    given = arguments(vectors=3) | {"bias": mx.zeros((8,), mx.float16), "x": mx.zeros((1, 3, 128), mx.float16)}
    try:
        prepared = launch_planes(**given).prepared
        for x in (given["x"], given["x"] + 1):
            assert prepared(x, *given["weights"], given["scales"], *given["biases"], given["bias"]).shape == (1, 3, 8)
    finally:
        metal.build.cache_clear()
    assert len(built) == 1
    assert "//" not in built[0]["source"] + built[0]["header"]
    assert [inputs[0].sum().item() for inputs, _ in called] == [0, 3 * 128]
    assert all(len(inputs) == len(built[0]["input_names"]) and "template" not in options for inputs, options in called)


def test_a_small_array_is_padded_and_no_other():
    launch = symmetric_launch(**rowwise_arguments(rows=3))
    complete = launch.prepared.completed(launch.inputs)
    assert [array.shape for array in complete] == [(1, 21), (3, 32), (8,), (3,)]
    assert complete[2].tolist()[:3] == launch.inputs[2].tolist()
