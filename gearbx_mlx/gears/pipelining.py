"""A model of which each rank has some of the layers: a pipeline, in which hidden states go from rank to rank."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.pipeline import PipelineMixin
from msgspec.structs import replace

from ..errors import GearbxError
from ..ranks.meeting import gathered
from .fingerprint import fingerprint_of, sample
from .saved import SavedGears
from .sharding import SHARDED, Sharding


def cut_into_stages(model: nn.Module, group: mx.distributed.Group) -> None:
    """Leave a rank its layers of a model whose weights may be unread, in memory.

    Nothing of other ranks' layers is read. What mlx-lm gives to every stage, such as the head, every rank has.

    Raises:
        GearbxError: as `cut`.
    """
    cut(model, group)
    mx.eval(model.parameters())
    setattr(model, SHARDED, Sharding(group, {}, fingerprint_of_all(model, group)))


def stage_of(model: nn.Module, saved: SavedGears, group: mx.distributed.Group) -> SavedGears:
    """Leave a rank its layers of the base of a geared checkpoint, unread, and return their gears.

    Raises:
        GearbxError: as `cut`; layers of the manifest that the model does not have.
    """
    saved.check(model)
    cut(model, group)
    setattr(model, SHARDED, Sharding(group, {}, saved.manifest.fingerprint))
    own = dict(model.named_modules())
    layers = {path: layer for path, layer in saved.manifest.layers.items() if path in own}
    return SavedGears(saved.directory, replace(saved.manifest, layers=layers), saved.hashes)


def cut(model: nn.Module, group: mx.distributed.Group) -> None:
    """Leave a rank its layers; the last rank has the first ones.

    Raises:
        GearbxError: the class has no pipeline, or fewer layers than there are ranks.
    """
    inner = getattr(model, "model", None)
    if not isinstance(inner, PipelineMixin):
        name = type(model).__module__.rpartition(".")[2]
        raise GearbxError(f"mlx-lm's class '{name}' has no pipeline; leave --pipeline out, which divides each layer")
    if len(inner.layers) < group.size():
        raise GearbxError(f"the model has {len(inner.layers)} layers for {group.size()} ranks; start fewer")
    inner.pipeline(group)


def fingerprint_of_all(model: nn.Module, group: mx.distributed.Group) -> str:
    """The fingerprint of the whole model, from the arrays of all ranks.

    Raises:
        GearbxError: an array of several ranks that they do not have in common.
    """
    own = {
        name: [list(array.shape), np.array(sample(array)).tobytes().hex()]
        for name, array in tree_flatten(model.parameters())
    }
    every: dict[str, list] = {}
    for rank, arrays in enumerate(gathered(group, own)):
        for name, described in arrays.items():
            if every.setdefault(name, described) != described:
                raise GearbxError(f"rank {rank} has another {name} than the ranks before it; give all the same model")
    samples = {name: (shape, np.frombuffer(bytes.fromhex(few), np.float32)) for name, (shape, few) in every.items()}
    return fingerprint_of({name: (tuple(shape), few) for name, (shape, few) in samples.items()})
