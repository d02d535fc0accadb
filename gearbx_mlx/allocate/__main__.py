"""python -m gearbx_mlx.allocate."""

from . import main

main()
