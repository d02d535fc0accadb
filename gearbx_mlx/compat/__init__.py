"""All that rests on what MLX and mlx-lm do not promise."""
