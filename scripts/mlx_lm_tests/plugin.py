"""A pytest plugin: our model wherever mlx-lm's tests load or make one, and the demo model instead of the Hub's.

GEARBX_WRAPPER names the wrapper that replaces the model, GEARBX_OUTCOMES the file that gets a line for each outcome.
"""

import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from gearbx_mlx.loading import DEMO_MODEL

from .wrappers import WRAPPERS

LARGEST = 10**8  # parameters of a random model. mlx-lm's tests never compute larger ones, which a gearbox has to

wrap = WRAPPERS[os.environ["GEARBX_WRAPPER"]]
load_from_hub = mlx_lm.utils.load
loaded: list[tuple[Any, set[str]]] = []  # models, and the names of their attributes


def load_demo(repository: str, *arguments: Any, **keywords: Any) -> tuple:
    """mlx-lm's `load`, which returns the demo model for every name."""
    model, *others = load_from_hub(str(DEMO_MODEL), *arguments, **keywords)
    model = wrap(model)
    loaded.append((model, set(vars(model))))
    return model, *others


mlx_lm.load = mlx_lm.utils.load = load_demo  # before the tests import it


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Helpers of the tests that try a model (`model_test_runner`, ...) get it wrapped."""
    for kind in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls}:
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if list(inspect.signature(function).parameters)[1:2] == ["model"]:
                setattr(kind, name, with_wrapped(function))


def pytest_runtest_teardown() -> None:
    """A failed test may leave an attribute (`make_cache`) on a model; the next test must not see it."""
    for model, names in loaded:
        for name in vars(model).keys() - names:
            del vars(model)[name]


def with_wrapped(function: Callable) -> Callable:
    def helper(self: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
        count = sum(array.size for _, array in tree_flatten(model.parameters()))
        if count > LARGEST:
            pytest.skip(f"{count:.1e} random parameters")
        return function(self, wrap(model), *arguments, **keywords)

    return helper


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test and each of its parts: name, outcome, and the error's last line."""
    if report.when != "call" and report.passed:
        return
    context = getattr(report, "context", None)  # of a part of a test
    name = report.nodeid.rpartition("::")[2] + (f" {context.kwargs}" if context else "")
    crash = getattr(report.longrepr, "reprcrash", None)
    why = crash.message.splitlines()[0] if crash else ""
    with open(os.environ["GEARBX_OUTCOMES"], "a", encoding="utf-8") as file:
        print(json.dumps({"name": name, "outcome": report.outcome, "why": why}), file=file)
