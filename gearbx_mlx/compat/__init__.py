"""All that rests on what MLX, mlx-lm and transformers do not promise: private names, bytecode, source, classes.

Each assumption has a test in tests/compat/test_compat.py that names it. What could go wrong without a word where it
does not hold is off with versions of MLX and mlx-lm that are not tested (`versions.py`).
"""
