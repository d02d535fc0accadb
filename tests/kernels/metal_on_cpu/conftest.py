from typing import Any

import mlx.core as mx
import pytest

from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.metal import Prepared

from .cases import read_once, run_prepared
from .compiler import find_clang

NOT_CHECKED = "METAL WAS NOT CHECKED: that needs Linux and clang++ 17 or later (apt-get install clang-19)"


def pytest_collection_modifyitems(items):
    """Without clang, tests that run kernels are skipped."""
    if find_clang() is None:
        for item in items:
            if item.get_closest_marker("clang"):
                item.add_marker(pytest.mark.skip(reason=NOT_CHECKED))


@pytest.fixture
def launches(monkeypatch, own_cache) -> list[Prepared]:
    """Metal seems to be here, and the harness runs what a Mac would launch; gives the launches as they come.

    Each test finds out which kernels are right, and the result is not kept.
    """
    seen = []

    def run(self: Prepared, *inputs: Any) -> mx.array:
        report = run_prepared(self, inputs)
        assert report.error == ""
        assert all(report.reads[name].max() == 1 for name in read_once(self.spec))
        seen.append(self)
        return self.result(mx.array(report.out[0], self.options["output_dtypes"][0]))

    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(Prepared, "__call__", run)
    return seen
