"""The fingerprint of a model: a calibration file names it, and is refused by any other model."""

import hashlib
from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .adapters import adapter_arrays, base_arrays

SAMPLED = 8  # values of each array: enough to tell a fine-tuned model from the one that it came from


def fingerprint(model: nn.Module) -> str:
    """32 hexadecimal digits from names, shapes and a few values of all parameters; the same in every type."""
    return with_adapters(fingerprint_of_arrays(base_arrays(model)), model)


def with_adapters(base: str, model: nn.Module) -> str:
    """The fingerprint of a model with its adapters, from that of the model without them."""
    own = adapter_arrays(model)
    return hashlib.sha256(f"{base} {fingerprint_of_arrays(own)}".encode()).hexdigest()[:32] if own else base


def fingerprint_of_arrays(arrays: Mapping[str, mx.array]) -> str:
    """The fingerprint of parameters, by name."""
    few = {name: sample(array) for name, array in arrays.items()}
    mx.eval(few)
    return fingerprint_of({name: (array.shape, np.array(few[name])) for name, array in arrays.items()})


def sample(array: mx.array) -> mx.array:
    """A few values of a parameter, in float32."""
    return array.reshape(-1)[:: max(1, array.size // SAMPLED)][:SAMPLED].astype(mx.float32)


def fingerprint_of(samples: Mapping[str, tuple[Sequence[int], np.ndarray]]) -> str:
    """The fingerprint of a model, from the shape and the sample of every parameter, by name."""
    digest = hashlib.sha256()
    for name, (shape, values) in sorted(samples.items(), key=lambda item: item[0]):
        digest.update(f"{name} {tuple(shape)} ".encode() + values.tobytes())
    return digest.hexdigest()[:32]
