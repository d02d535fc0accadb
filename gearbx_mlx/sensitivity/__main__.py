"""python -m gearbx_mlx.sensitivity."""

from . import main

main()
