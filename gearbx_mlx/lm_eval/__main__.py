"""python -m gearbx_mlx.lm_eval."""

from . import main

main()
