"""Kernels over packed arrays. Knows arrays only, no modules.

Here are the names of devices, kernels and activations, for flags and settings: importing them loads neither mlx nor
numpy.
"""

DEVICES = ("cpu", "gpu")
DENSE = 16  # bits of the weights as they are, in the type of the checkpoint
GROUP_SIZES = (32, 64, 128)  # of planes: inputs that share a scale
MEASURE = "measure"
KERNELS = ("auto", "native", "mlx", MEASURE)
ACTIVATIONS = {"int16": 16, "int8": 8, "float": 0}  # bits to which native CPU kernels round activations; 0: none
