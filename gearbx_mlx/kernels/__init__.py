"""Kernels over packed arrays, without modules.

This file has names of devices, kernels and activations for flags and settings, and imports neither mlx nor numpy.
"""

DEVICES = ("cpu", "gpu")
DENSE = 16  # value of bits for the original weights, in the checkpoint's type
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale of planes
MEASURE = "measure"
KERNELS = ("auto", "native", "mlx", MEASURE)
ACTIVATIONS = {"int16": 16, "int8": 8, "float": 0}  # bits of quantized activations in CPU kernels; 0: not quantized
