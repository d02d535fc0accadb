"""python -m gearbx_mlx.convert."""

from . import main

main()
