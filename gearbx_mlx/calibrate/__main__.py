"""python -m gearbx_mlx.calibrate."""

from . import main

main()
