"""python -m gearbx_mlx.benchmark."""

from . import main

main()
