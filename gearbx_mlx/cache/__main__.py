"""python -m gearbx_mlx.cache."""

from . import main

main()
