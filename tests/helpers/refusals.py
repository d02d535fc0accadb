"""Check that a command, or a function, refuses in one line that has the words it must have."""

from contextlib import contextmanager

import pytest

from gearbx_mlx import GearbxError, load


@contextmanager
def refuses(*words):
    """Expect a GearbxError of one line that has these words."""
    with pytest.raises(GearbxError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message


def assert_not_loaded(directory, *words):
    """The directory is refused as a model in one line that names it and has these words."""
    with refuses(directory, *words):
        load(directory)


def assert_refused(result, *words, folder=None):
    """The command ended with one line that has these words, and left no file in the folder."""
    assert result.status == 2
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert len(lines) == 1, result.err
    assert "error: " in lines[0]
    for word in words:
        assert str(word) in lines[0]
    if folder:
        assert not [path for path in folder.rglob("*") if path.suffix in (".part", ".json", ".jsonl", ".png")]
