"""Everything that relies on unpromised behavior of MLX, mlx-lm and transformers: private names, bytecode, source.

Each assumption has a test with its name in tests/compat/test_compat.py. Parts that could silently fail are switched off
with untested versions of MLX and mlx-lm (`versions.py`).
"""
