"""Modules for formats that MLX has no kernel for: reconstruct the dense weight, then multiply with MLX (GEARBX 7.1)."""

from collections.abc import Mapping
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear

Arrays = Mapping[str, mx.array]
K = TypeVar("K")


class Reconstructed(nn.Module):
    """A frozen layer over packed rows, which shares the dense layer's bias.

    Args:
        dense: the Linear, SwitchLinear or MultiLinear that this layer replaces; only its shape and bias are used.
        bits: of a code.
        arrays: name to array: `weight` (..., O, words), the packed codes, and others such as `scales`. For experts,
            each has a leading dimension E.
        cache: keep the reconstruction after its first use, until `forget`. That saves time, and costs as much memory
            as the dense weight. Not for use inside `mx.compile`.
    """

    def __init__(self, dense: nn.Module, bits: int, arrays: Arrays, cache: bool = False):
        super().__init__()
        self.bits = bits
        self.input_dims = dense.weight.shape[-1]
        self.cache = cache
        # The name begins with _, so MLX does not treat the reconstruction as a parameter, to be saved or offloaded.
        self._kept: mx.array | None = None
        self._names = tuple(arrays)
        for name, array in arrays.items():
            self[name] = array
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze()

    def reconstruct(self, arrays: Arrays, dtype: mx.Dtype) -> mx.array:
        """The dense weight (..., O, I) for packed rows, of type `dtype`."""
        raise NotImplementedError

    def packed(self) -> dict[str, mx.array]:
        """The packed weight: the arrays by name."""
        return {name: self[name] for name in self["_names"]}  # as an attribute it is looked up slowly

    def dense_weight(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The whole weight (..., O, I), from the cache if it is there in this type."""
        if self._kept is not None and self._kept.dtype == dtype:
            return self._kept
        weight = self.reconstruct(self.packed(), dtype)
        self._kept = weight if self.cache else None
        return weight

    def forget(self) -> None:
        """Empty the cache."""
        self._kept = None

    @property
    def output_dims(self) -> int:
        return self.weight.shape[-2]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (..., O, I) of the dense weight."""
        return (*self.weight.shape[:-1], self.input_dims)

    def _extra_repr(self) -> str:
        return f"shape={self.weight_shape}, bits={self.bits}, bias={'bias' in self}, cache={self.cache}"


class ReconstructedLinear(Reconstructed):
    """A linear layer (..., I) -> (..., O) over packed rows."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.dense_weight(x.dtype).T
        return mx.addmm(self["bias"], x, weight) if "bias" in self else x @ weight


class ReconstructedSwitchLinear(Reconstructed):
    """A SwitchLinear over packed rows: E experts of one shape, chosen by `indices`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if self.cache or indices.size >= self.num_experts:
            weight, chosen = self.dense_weight(x.dtype), indices
        else:  # a token uses few of many experts, and only those are reconstructed
            picked = indices.flatten()
            weight = self.reconstruct({name: array[picked] for name, array in self.packed().items()}, x.dtype)
            chosen = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]


class ReconstructedMultiLinear(Reconstructed):
    """A MultiLinear over packed rows: a matrix for each head, (..., H, T, I) -> (..., H, T, O)."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        weight = self.dense_weight(x.dtype)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)


def kind_for(dense: nn.Module, linear: K, experts: K, heads: K) -> K:
    """The class for a layer: `linear` for a Linear, `experts` for a SwitchLinear, `heads` for a MultiLinear."""
    if isinstance(dense, MultiLinear):
        return heads
    return linear if dense.weight.ndim == 2 else experts
