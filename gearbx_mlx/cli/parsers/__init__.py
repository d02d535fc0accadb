"""One file for each command: its flags, and the settings that it runs with. Nothing here imports mlx-lm."""
