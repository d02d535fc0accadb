"""Exit status of a command on one of several ranks; no rank is started."""

from types import SimpleNamespace

import pytest

from gearbx_mlx.cli import start
from gearbx_mlx.ranks.place import Place


@pytest.mark.parametrize(("own", "verdict", "status"), [(0, SimpleNamespace(status=3), 3), (2, None, 2)])
def test_rank_ends_with_status_of_the_run(monkeypatch, own, verdict, status):
    ended, finished = [], []
    monkeypatch.setattr(start.os, "_exit", ended.append)
    monkeypatch.setattr(start, "begin", lambda place: None)
    start.end(SimpleNamespace(verdict=verdict, finish=finished.append), Place(1, 2, "ring", ()), lambda: own)
    assert (ended, finished) == ([status], [own] if verdict is None else [])
