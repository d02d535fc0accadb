"""python -m gearbx_mlx.list."""

from . import main

main()
