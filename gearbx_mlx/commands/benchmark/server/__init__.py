"""`benchmark server`: our server beside mlx_lm.server, and under many clients at once."""
