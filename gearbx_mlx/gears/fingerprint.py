"""Which model this is, told by its weights: what was calibrated on one is of no use to another."""

import hashlib
from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

SAMPLED = 8  # values of each array: enough to tell a fine-tuned model from the one that it came from


def fingerprint(model: nn.Module) -> str:
    """32 hexadecimal digits from names, shapes and a few values of all parameters, whatever type they are held in."""
    arrays = dict(tree_flatten(model.parameters()))
    few = {name: sample(array) for name, array in arrays.items()}
    mx.eval(few)
    return fingerprint_of({name: (array.shape, np.array(few[name])) for name, array in arrays.items()})


def sample(array: mx.array) -> mx.array:
    """A few values of a parameter, in float32."""
    return array.reshape(-1)[:: max(1, array.size // SAMPLED)][:SAMPLED].astype(mx.float32)


def fingerprint_of(samples: Mapping[str, tuple[Sequence[int], np.ndarray]]) -> str:
    """The fingerprint of a model of which name, shape and sample of every parameter are known."""
    digest = hashlib.sha256()
    for name, (shape, values) in sorted(samples.items(), key=lambda item: item[0]):
        digest.update(f"{name} {tuple(shape)} ".encode() + values.tobytes())
    return digest.hexdigest()[:32]
