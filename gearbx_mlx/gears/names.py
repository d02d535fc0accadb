"""Names and defaults of a gearbox's settings, for parsers and help texts: importing them does not load MLX."""

DEFAULT_LADDER = "4,8,16"
WHOLE, WHOLE_LADDER = "exact", "4,16"  # format and gears of bfloat16 weights in mode lossless
DEFAULT_KERNELS = "mlx"
DEFAULT_ACTIVATIONS = "int16"
DEFAULT_GROUP_SIZE = 64
GROUP_SIZES = (32, 64, 128)
EMBEDDINGS = ("quantize", "keep")  # in a geared checkpoint
DTYPES = ("float32", "bfloat16", "float16")
MANAGE = ("all", "attention", "mlp", "everything")
RESIDENCIES = ("resident", "host", "disk", "stream")
