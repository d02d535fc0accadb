"""mlx-lm's own tests with this package's models in place of mlx-lm's."""
