"""Agreement of ranks, seen from rank 0; no rank is started."""

from types import SimpleNamespace

import mlx.core as mx

from gearbx_mlx.ranks.agreement import Agreement


def test_numbers_arrive_with_all_bits(monkeypatch):
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, group: array)  # other ranks add zeros
    values = [0, 7, 2**32 - 1, 2**32, 1 << 40, 2**63 - 1]
    assert Agreement(SimpleNamespace(size=lambda: 2, rank=lambda: 0)).numbers(values) == values
