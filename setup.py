"""Where packages are, and the compiled kernels of a wheel; all else is in pyproject.toml.

`GEARBX_WHEEL=kernels pip wheel --no-deps .` builds a wheel with CPU kernels for this system and this version of Python
(gearbx_mlx/kernels/wheel.py). Without the variable nothing is compiled, and one wheel is for all.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
WITH_KERNELS = os.environ.get("GEARBX_WHEEL") == "kernels"
DEPENDENCIES = (
    (HERE / "pyproject.toml").read_text(encoding="utf-8").partition("\ndependencies = [")[2].partition("\n]")[0]
)
NEEDED = r'"((?:mlx|nanobind|lazy_loader|msgspec)\b(?!-)[^"]*)"'  # by the modules that compile


class BuildKernels(build_ext):
    """Compiles the CPU kernels; a development install does so at first use."""

    def run(self):
        if not self.inplace:
            sys.path.insert(0, str(HERE))
            from gearbx_mlx.kernels.compiler import build_for_wheel

            build_for_wheel(Path(self.build_lib, "gearbx_mlx", "kernels", "brought"))

    def get_outputs(self):
        return [str(file) for file in Path(self.build_lib, "gearbx_mlx", "kernels", "brought").glob("*")]


with_kernels = {
    "ext_modules": [Extension("gearbx_mlx.kernels.brought", [])],  # so that the wheel is for one system
    "cmdclass": {"build_ext": BuildKernels},
    "setup_requires": re.findall(NEEDED, DEPENDENCIES),
}
setup(
    # The kernels' text in metal/ is installed beside the code that reads it.
    packages=[*find_packages(include=["gearbx_mlx*"]), "gearbx_mlx.metal"],
    package_dir={"gearbx_mlx.metal": "metal"},
    **(with_kernels if WITH_KERNELS else {}),
)
