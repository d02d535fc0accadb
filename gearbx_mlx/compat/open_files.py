"""Workaround for the import of mlx_lm.utils: it sets limits of open files, and fails below a hard limit of 4,096."""

SOFT, HARD = 2048, 4096  # limits that mlx-lm sets

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
