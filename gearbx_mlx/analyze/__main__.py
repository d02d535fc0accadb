"""python -m gearbx_mlx.analyze."""

from . import main

main()
