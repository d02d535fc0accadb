"""Entry point of `python -m gearbx_mlx.server`."""

from . import main

main()
