"""The length of a model's logits, traced once for a gearbox: each trace takes as long as several tokens."""

from typing import Any
from weakref import WeakKeyDictionary

from ..gears.discovery import vocabulary

_known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def vocabulary_of(gearbox: Any) -> int:
    """V of the gearbox's (or Observer's) model. Raises GearbxError for a model that turns no token into logits."""
    if gearbox not in _known:
        _known[gearbox] = vocabulary(gearbox.model)
    return _known[gearbox]
