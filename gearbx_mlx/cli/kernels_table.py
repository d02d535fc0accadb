"""What was measured for the kernels of a model's products, as a table."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

from ..kernels.dispatch import STOCK
from ..kernels.tuner import FAILED, Times

ROUNDING = "MLX's kernels (mlx, reconstruct) and ours give other last bits; ours among each other give the same."


def kernels_table(used: Mapping[str, tuple[str, Times]]) -> Table:
    """A row for each product: the kernel that was chosen, its microseconds, and how many times as long others take.

    Args:
        used: product to the kernel and the seconds of all candidates (`Tuner.used`).
    """
    caption = ROUNDING if in_both(used) else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("product", "kernel", "us", "others take"):
        table.add_column(name, justify="right" if name == "us" else "left")
    for product, (chosen, times) in used.items():
        others = ", ".join(f"{name} {ratio(times, name, chosen)}" for name in times if name != chosen)
        table.add_row(product, chosen, f"{times[chosen] * 1e6:.1f}", others)
    return table


def ratio(times: Times, name: str, chosen: str) -> str:
    return "does not run" if times[name] == FAILED else f"{times[name] / times[chosen]:.2f} times"


def in_both(used: Mapping[str, tuple[str, Times]]) -> bool:
    """Whether candidates differ in the last bits."""
    return any({name in STOCK for name in times} == {True, False} for _, times in used.values())
