"""Everything that relies on unpromised behavior of MLX, mlx-lm and transformers: private names, bytecode, source.

Each assumption has a test with its name in tests/compat/test_compat.py. Parts that could silently fail are switched off
with untested versions of MLX and mlx-lm (`versions.py`).
"""

SOFT, HARD = 2048, 4096  # limits of open files that mlx_lm.utils sets; its import fails below a lower hard limit

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def import_within_limit() -> None:
    """Import mlx_lm.utils with a hard limit below mlx-lm's; that limit stays, and the soft one is raised to it."""
    if resource is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= HARD:
        return
    own = resource.setrlimit
    resource.setrlimit = lambda which, _: own(which, (min(SOFT, hard), hard))
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = own
