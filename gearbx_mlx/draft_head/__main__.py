"""python -m gearbx_mlx.draft_head."""

from . import main

main()
