import pytest

from .compiler import find_clang

NOT_CHECKED = "METAL WAS NOT CHECKED: that needs Linux and clang++ 17 or later (apt-get install clang-19)"


def pytest_collection_modifyitems(items):
    """Without clang, tests that run kernels are skipped."""
    if find_clang() is None:
        for item in items:
            if item.get_closest_marker("clang"):
                item.add_marker(pytest.mark.skip(reason=NOT_CHECKED))


def pytest_terminal_summary(terminalreporter):
    """Skips are quiet under -q; this one is not to be missed."""
    if find_clang() is None:
        terminalreporter.write_line(NOT_CHECKED, red=True, bold=True)
