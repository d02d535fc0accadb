"""Flags of texts that share passes."""

from typing import Any

from ..routing.gates import DEFAULT_POLICY
from .settings import flag


def batch_policy_flag() -> Any:
    """--batch-policy, the same wherever texts share passes."""
    return flag(
        DEFAULT_POLICY,
        "The gear of a step in which several texts share the weights, by the gears that they want: highest, most (the "
        "most wanted), or quantile:Q (the lowest that is enough for a share Q of them).",
        named=True,
    )
