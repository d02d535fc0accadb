"""Which operations beside products a model with native kernels computes with them: the device decides."""

from .candidates import CPU, METAL, device

NORMS, GATES, POSITIONS, ATTENTION, WHOLE_BLOCKS = OPERATIONS = (
    "norms",
    "gates",
    "positions",
    "attention",
    "whole blocks",
)


def native_operations(ours_alone: bool) -> tuple[str, ...]:
    """The operations, of OPERATIONS, whose modules are replaced in a model with native kernels.

    A CPU gains by all of them. On a GPU MLX's own are fast. With Metal, those that are replaced on demand give a row
    the same bits whichever others are in the call (metal/README.md); MLX's norms and gates do so too.

    Args:
        ours_alone: whether our kernels are asked for wherever there are some.
    """
    on = device()
    if on == CPU:
        return OPERATIONS
    return (POSITIONS, ATTENTION) if on == METAL and ours_alone else ()
