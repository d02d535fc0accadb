"""The models that the command lists: names for --model, sizes and gears, also beside damaged ones."""

import json
import shutil

import pytest
from gguf_files import tiny_as, write
from refusals import assert_refused

from gearbx_mlx.loading import DEMO_MODEL


def rows_of(result) -> dict[str, str]:
    """The cells after each name."""
    assert result.status == 0, result.err
    lines = result.out.splitlines()[2:]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if not line.startswith("smollm2 ")}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub cache without models."""
    monkeypatch.setattr("gearbx_mlx.list.run.scan_cache_dir", lambda: scanned(tmp_path / "hub"))
    return tmp_path / "hub"


def scanned(folder):
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(folder)


def put_into(hub, name: str, config: dict, weights: int) -> None:
    repo, revision = hub / f"models--{name.replace('/', '--')}", "a" * 40
    snapshot = repo / "snapshots" / revision
    for folder in (snapshot, repo / "refs", repo / "blobs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot / "model.safetensors").write_bytes(bytes(weights))


@pytest.mark.slow
def test_models_of_a_directory_with_their_gears(command, hub, tmp_path):
    place = tmp_path / "models"
    shutil.copytree(DEMO_MODEL, place / "original")
    assert command("convert", "--gears", "4,8,16", "--calibrate", "none", "--mlx-path", place / "geared").status == 0
    size = write(place / "tiny.gguf", tiny_as("llama")).stat().st_size
    (place / "other").mkdir()
    found = rows_of(command("list", "--directory", place))
    assert found.keys() == {str(place / name) for name in ("original", "geared", "tiny.gguf")}
    assert found[str(place / "geared")].endswith("4,8,16 stored, planes")
    assert found[str(place / "original")] == "directory 11 MB original: made at the start"
    assert found[str(place / "tiny.gguf")] == f"GGUF file {size / 1000:.3g} kB its own codes"


def test_models_of_the_hubs_cache(command, hub, tmp_path):
    put_into(hub, "owner/eight", {"quantization": {"bits": 8, "group_size": 64}}, 5000)
    put_into(hub, "owner/plain", {}, 2000)
    found = rows_of(command("list", "--directory", tmp_path))
    assert found["owner/eight"] == "Hub cache 5 kB 8-bit codes"
    assert found["owner/plain"] == "Hub cache 2 kB original: made at the start"


@pytest.mark.parametrize("config", ["{", "[]", '{"quantization": 4}', "\udcff"])
def test_a_damaged_model_is_listed_as_damaged(command, hub, tmp_path, config):
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(10))
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "bad" / "config.json").write_text(config, errors="surrogateescape")
    found = rows_of(command("list", "--directory", tmp_path))
    assert found[str(tmp_path / "bad")].startswith("directory 10 B damaged: ")
    assert found[str(tmp_path / "good")] == "directory 10 B original: made at the start"


def test_no_such_directory(command, hub, tmp_path):
    assert_refused(command("list", "--directory", tmp_path / "none"), "none: cannot be read", "--directory")
