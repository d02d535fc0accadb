"""Where packages are; all else is in pyproject.toml, which cannot both search for packages and map a folder to one."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["gearbx_mlx*"]), "gearbx_mlx.metal"],
    package_dir={"gearbx_mlx.metal": "metal"},  # the kernels' text, installed beside the code that reads it
)
