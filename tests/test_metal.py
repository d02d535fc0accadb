"""What can be said about the Metal kernels without clang: selection, bad input, packaging, the benchmark's script."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.metal import available, choose_variant
from gearbx_mlx.kernels.metal_formats import planes_launch
from gearbx_mlx.kernels.reference import planes_matmul

ROOT = Path(__file__).parents[1]
needs_metal = pytest.mark.skipif(not available(), reason=f"not run on Metal: {available().reason}")
without_metal = pytest.mark.skipif(bool(available()), reason="Metal is here")


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


@without_metal
def test_without_metal_one_line_says_why():
    assert not available()
    assert "Metal" in available().reason
    assert "\n" not in available().reason
    with pytest.raises(GearbxError, match="Metal"):
        planes_launch(**arguments()).run()


def test_nothing_is_built_at_import():
    program = "import mlx.core as mx; mx.fast = None; import gearbx_mlx.kernels.metal_formats"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@needs_metal
@pytest.mark.parametrize("variant", metal.VARIANTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_on_metal_itself(bits, variant):
    given = arguments(bits=bits, rows=37, columns=576, dtype=mx.float32, vectors=3)
    y = planes_launch(**given, variant=variant).run()
    assert mx.allclose(y, planes_matmul(**given), atol=1e-3)


def test_selection():
    assert choose_variant(4, 4096, 1, mx.float16).name == "registers"
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
        ({"x": mx.zeros((9, 128), mx.float16)}, "not 1 to 8 vectors"),
        ({"x": mx.zeros((0, 128), mx.float16)}, "not 1 to 8 vectors"),
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
        planes_launch(**arguments() | changed)


def test_names_are_unique():
    """MLX keeps compiled kernels by name: two texts of one name would be mistaken for each other."""
    launches = [
        planes_launch(**arguments(bits=bits, vectors=vectors, columns=columns), variant=variant)
        for bits in (2, 4, 8)
        for vectors in (1, 2, 3)
        for columns in (128, 256)
        for variant in metal.VARIANTS
    ]
    texts = {launch.spec.name: launch.spec.header for launch in launches}
    assert len(texts) == len(set(texts.values())) == 27


def test_shape_of_the_result_is_that_of_the_activations():
    given = arguments()
    given["x"] = mx.zeros((2, 1, 128), mx.float16)
    assert planes_launch(**given).shape == (2, 1, 8)


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
    assert len(kernels) == 2
    assert kernels | code <= packed

    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path / "installed")
    program = "from gearbx_mlx.kernels.metal import source_text as t; print(len(t('matvec')) and len(t('codes')))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path / "installed")
