"""Keywords of mlx-lm that a mode cannot take."""

from collections.abc import Mapping
from typing import Any

from ..errors import GearbxError


def refuse_draft_model(mode: str, keywords: Mapping[str, Any]) -> None:
    """Raises GearbxError for a draft model in a mode whose gears are all of one model."""
    if keywords.get("draft_model") is not None:
        raise GearbxError(f"mode '{mode}' takes no draft model: the gears are all of one model; use mode 'route'")
