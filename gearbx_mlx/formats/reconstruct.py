"""Modules of formats without a kernel of their own: the dense weight is reconstructed, MLX multiplies (GEARBX 7.1)."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

Arrays = Mapping[str, mx.array]


class Reconstructed(nn.Module):
    """A frozen layer over packed rows: `weight` (..., O, words), what goes with it, and the dense layer's bias, shared.

    Args:
        dense: the Linear or SwitchLinear whose gear this is; only its shape and its bias are used.
        bits: of a code.
        arrays: name to array: `weight`, the packed codes, and others such as `scales`; of experts, (E, ...) each.
        cache: keep the reconstruction after its first use. It is as large as the dense weight, so that this buys time
            with the memory that the gear was to save; `forget` gives it back. Not for use inside `mx.compile`.
    """

    def __init__(self, dense: nn.Module, bits: int, arrays: Arrays, cache: bool = False):
        super().__init__()
        self.bits = bits
        self.input_dims = dense.weight.shape[-1]
        self.cache = cache
        # MLX takes names that begin with _ for no parameter: a reconstruction is neither saved, counted nor parked.
        self._kept: mx.array | None = None
        self._names = tuple(arrays)
        for name, array in arrays.items():
            self[name] = array
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze()

    def reconstruct(self, arrays: Arrays, dtype: mx.Dtype) -> mx.array:
        """The dense weight (..., O, I) of packed rows, in the type to compute in."""
        raise NotImplementedError

    def packed(self) -> dict[str, mx.array]:
        """The arrays that stand for the weight."""
        return {name: self[name] for name in self._names}

    def dense_weight(self, dtype: mx.Dtype) -> mx.array:
        """The whole weight (..., O, I): from the cache, if it has it in this type."""
        if self._kept is not None and self._kept.dtype == dtype:
            return self._kept
        weight = self.reconstruct(self.packed(), dtype)
        self._kept = weight if self.cache else None
        return weight

    def forget(self) -> None:
        """Drop what the cache holds."""
        self._kept = None

    @property
    def output_dims(self) -> int:
        return self.weight.shape[-2]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the weight that the packed rows stand for."""
        return (*self.weight.shape[:-1], self.input_dims)

    def _extra_repr(self) -> str:
        return f"shape={self.weight_shape}, bits={self.bits}, bias={'bias' in self}, cache={self.cache}"


class ReconstructedLinear(Reconstructed):
    """A linear layer (..., I) -> (..., O)."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.dense_weight(x.dtype).T
        return mx.addmm(self["bias"], x, weight) if "bias" in self else x @ weight


class ReconstructedSwitchLinear(Reconstructed):
    """mlx-lm's SwitchLinear (E experts of one shape, chosen by `indices`)."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if self.cache or indices.size >= self.num_experts:
            weight, chosen = self.dense_weight(x.dtype), indices
        else:  # a token uses few experts of many: only those are reconstructed
            picked = indices.flatten()
            weight = self.reconstruct({name: array[picked] for name, array in self.packed().items()}, x.dtype)
            chosen = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]
