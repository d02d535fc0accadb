"""python -m gearbx_mlx.generate."""

from . import main

main()
