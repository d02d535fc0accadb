"""Warnings about a model that needs more memory than a GPU recommends."""

from types import SimpleNamespace

from gearbx_mlx.cli.memory import room_warnings
from gearbx_mlx.gears.ladder import Ladder


def test_weights_on_disk_are_named_without_size():
    needs = lambda model, resident: 200 if resident else 90  # noqa: E731
    stored = SimpleNamespace(format="planes", ladder=Ladder([4, 8]), needs=needs)
    stored._replace = lambda ladder: stored
    machine = SimpleNamespace(whole=1000, recommended=100, device="cpu")
    model = SimpleNamespace(machine=machine, size=90, saved=None, codes=None, original=True, title="demo")
    (line,) = room_warnings(model, stored, "resident", drafts=False)
    assert line.endswith("recommended for this GPU; use --residency disk")
