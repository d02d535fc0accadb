"""Names of kernels and activations, for flags and settings. Importing them loads neither mlx nor numpy."""

MEASURE = "measure"
KERNELS = ("auto", "native", "mlx", MEASURE)
ACTIVATIONS = {"int16": 16, "int8": 8, "float": 0}  # bits to which native CPU kernels round activations; 0: none
