"""python -m gearbx_mlx.evaluate."""

from . import main

main()
