"""Which operations beside products a model with native kernels computes with them: the device decides."""

from . import metal

NORMS, GATES, POSITIONS, ATTENTION, WHOLE_BLOCKS = OPERATIONS = (
    "norms",
    "gates",
    "positions",
    "attention",
    "whole blocks",
)


def native_operations(kernels: str) -> tuple[str, ...]:
    """The operations, of OPERATIONS, whose modules are replaced in a model with native kernels.

    A CPU gains by all of them. On Metal MLX's own are fast, and those that are replaced on demand give a row the same
    bits whichever others are in the call (metal/README.md); MLX's norms and gates do so too.

    Args:
        kernels: one of KERNELS, as asked for.
    """
    if not metal.available():
        return OPERATIONS
    return (POSITIONS, ATTENTION) if kernels == "native" else ()
