"""Kernels over packed arrays. Knows arrays only, no modules."""
