"""Guards of a model with gears: it is still an `nn.Module`, but refuses changes that would reach only one gear.

Methods of the one model shadow its class's. Reading works in any gear: parameters, named modules, freeze, train,
print; and so do copies and casts. Changing or replacing a layer that changes gear is refused, and so is saving or
counting in a gear that mlx-lm could not load.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import GearbxError, one_line
from ..formats.tied import linear_of
from ..kernels.bit_planes import Planes
from .adapters import adapters_of, layers_of, places_of
from .ladder import DENSE
from .sharding import sharding_of

ATTACHED = "attached_gearbox"  # attribute of a model that has one
BEFORE = "do that before the model gets a gearbox"


class Owned:
    """Methods of a model with gears that replace its class's. paths: of the layers that change gear.

    unsaveable: returns the reason that mlx-lm could not load the current model, with a remedy; None if it could.
    gears: returns the trees of modules that a shift puts into the model.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Collection[str],
        unsaveable: Callable[[], str | None],
        gears: Callable[[], Collection[Any]] = tuple,
    ):
        self.model, self.paths, self.unsaveable, self.gears = model, paths, unsaveable, gears

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        """Update parameters. Raises GearbxError for new values of a layer that changes gear; its type may change."""
        given = dict(tree_flatten(parameters))
        if given and not any(array.size for array in given.values()):
            raise GearbxError("a model with gears keeps its arrays; save it with donate_model=False")
        now = dict(tree_flatten(self.model.parameters()))
        for name in self._owned(iter(given)):
            if is_cast(given[name], now.get(name)):
                continue
            why = "belongs to a layer that changes gear, and the other gears would keep the old values"
            raise GearbxError(f"{name} {why}; {BEFORE}")
        return type(self.model).update(self.model, parameters, strict)

    def update_modules(self, modules: Any, strict: bool = True) -> nn.Module:
        """Put a gear into the model, or other modules beside its gears.

        Raises:
            GearbxError: a replacement for a layer that changes gear.
        """
        if any(modules is gear for gear in self.gears()):
            return type(self.model).update_modules(self.model, modules, strict)
        given = dict(tree_flatten(modules, is_leaf=nn.Module.is_module))
        now = dict(self.model.named_modules())
        for path in self._owned(path for path, module in given.items() if module is not now.get(path)):
            raise GearbxError(f"{path} changes gear, so the next shift would undo this; {BEFORE}")
        return type(self.model).update_modules(self.model, modules, strict)

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
        """Load weights. Raises GearbxError as `update`, and for weights that do not fit the engaged gear."""
        try:
            return type(self.model).load_weights(self.model, file_or_weights, strict)
        except GearbxError:
            raise
        except (ValueError, RuntimeError) as error:
            raise GearbxError(f"these are not the weights of the engaged gear: {one_line(error)}") from error

    def save_weights(self, file: str) -> None:
        """Save the weights. Raises GearbxError in a gear that mlx-lm could not load."""
        self._check_saveable()
        type(self.model).save_weights(self.model, file)

    def leaf_modules(self) -> Any:
        """Return the leaf modules: mlx-lm saves, quantizes and counts them. Raises GearbxError as `save_weights`."""
        self._check_saveable()
        return type(self.model).leaf_modules(self.model)

    def _owned(self, names: Iterator[str]) -> Iterator[str]:
        """Yield the names of layers that change gear, with names inside of them and of modules that contain them."""
        places = places_of(self.model)
        owned = tuple(f"{places.get(path, path)}." for path in self.paths)
        return (
            name for name in names if f"{name}.".startswith(owned) or any(path.startswith(f"{name}.") for path in owned)
        )

    def _check_saveable(self) -> None:
        if sharding_of(self.model) is not None:
            raise GearbxError("this rank has only a part of the model; save the model from one process")
        if adapters_of(self.model):
            raise GearbxError(
                "mlx-lm cannot load a model with adapters inside; fuse them (mlx_lm.fuse), and use the result"
            )
        reason = self.unsaveable()
        if reason is not None:
            raise GearbxError(reason)


def is_cast(array: mx.array, now: mx.array | None) -> bool:
    """Return True if an array has the values of the current one, in whatever type."""
    if array is now:
        return True
    return now is not None and array.shape == now.shape and bool(mx.array_equal(now.astype(array.dtype), array).item())


def own(
    model: nn.Module,
    paths: Collection[str],
    unsaveable: Callable[[], str | None],
    gears: Callable[[], Collection[Any]] | None = None,
) -> None:
    """Give a model the methods of `Owned`, with its arguments; `gears` is None without a gearbox."""
    owned = Owned(model, paths, unsaveable, gears or tuple)
    for name in ("update", "load_weights", "save_weights", "leaf_modules"):
        setattr(model, name, getattr(owned, name))
    if gears is None:  # adapters may be added later
        return
    model.update_modules = owned.update_modules
    blocks = {*map(id, getattr(model, "layers", ()))}  # mlx-lm puts adapters into one block at a time
    for path, block in model.named_modules():
        if id(block) in blocks:
            inside = [each.removeprefix(f"{path}.") for each in paths if each.startswith(f"{path}.")]
            block.update_modules = Owned(block, inside, unsaveable).update_modules


def why_unsaveable(gearbox: Any) -> str | None:
    """Return why mlx-lm could not load the model of a Gearbox in the engaged gear; None if it could."""
    modules = layers_of(gearbox.model)
    for layer in gearbox.layers:
        bits = gearbox.bits_of(layer, gearbox.gear)
        is_whole = gearbox.source.widths(layer) in gearbox.format.ladders
        in_base = gearbox.saved is not None and gearbox.saved.in_base(layer, bits)
        in_panels = getattr(linear_of(modules[layer.path]), "record", Planes) is not Planes  # for a CPU's kernels
        if (bits != DENSE or is_whole) and (in_panels or not in_base):
            first = "" if is_whole else "shift to a 16-bit gear first, or "
            then = f"copy {gearbox.saved.directory}" if in_base else "write the gears with gearbx_mlx convert"
            return f"mlx-lm would not load {layer.path} of gear '{gearbox.gear.name}'; {first}{then}"
    return None
