"""python -m gearbx_mlx.chat."""

from . import main

main()
