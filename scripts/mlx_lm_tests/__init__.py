"""mlx-lm's own tests with this package's models in the place of mlx-lm's."""
