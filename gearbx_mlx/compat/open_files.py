"""mlx_lm.utils sets the limits of open files to 2,048 and 4,096 when it is imported, and fails below a hard limit."""

SOFT, HARD = 2048, 4096  # mlx-lm's

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def import_within_limit() -> None:
    """Import mlx_lm.utils where the hard limit is below mlx-lm's; that limit stays, and the soft one goes up to it."""
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
