"""Where low gears err (GEARBX 13): weights, attention, keys and values, weights that are quantized twice."""
