"""Towers: the parts of a model that read images or sound, and that no token of a text passes through."""

import re

TOWER = re.compile(r"vision|visual|image|audio|speech|multi_?modal|mm_projector|aligner")


def in_tower(path: str) -> bool:
    """Whether a module reads images or sound, by the names that mlx-lm and mlx-vlm give to such modules."""
    return TOWER.search(path.lower()) is not None
