"""Unpacked GGUF files in the cache: by contents, complete or absent, and of nobody else."""

import errno
import json
import os
import shutil

import mlx.core as mx
import pytest
from conftest import contents, weights_of
from gguf_files import tiny_as, write
from mutations import edit, flip
from refusals import refuses

import gearbx_mlx
from gearbx_mlx import GearbxError, GearbxWarning
from gearbx_mlx.files import gguf_model, unpacked
from gearbx_mlx.files.writing import new_directory
from gearbx_mlx.loading import find, fingerprint


@pytest.fixture
def file(tmp_path, own_cache):
    return write(tmp_path / "model.gguf", tiny_as("llama"))


def loaded_weights(file):
    return weights_of(gearbx_mlx.load(file)[0])


def flip_bit(file, place):
    file.write_bytes(flip(file.read_bytes(), place))


def test_replaced_file_of_same_size_is_unpacked_again(file):
    first, before = loaded_weights(file), file.stat()
    write(file, tiny_as("llama", seed=1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = loaded_weights(file)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not mx.array_equal(first[name], second[name])


def test_the_same_contents_are_unpacked_once(file, tmp_path, monkeypatch):
    directory = find(file)
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copyfile(file, tmp_path / "elsewhere" / "model.gguf")
    monkeypatch.setattr(unpacked, "make", lambda *_: pytest.fail("unpacked again"))
    assert find(copy) == directory


def test_any_changed_byte_makes_different_file(tmp_path, own_cache):
    file = tmp_path / "model.gguf"
    size = 2 * unpacked.PART_BYTES + 100
    file.write_bytes(bytes(size))
    found = {unpacked.contents(file)}
    for place in (0, 5000, unpacked.PART_BYTES - 1, unpacked.PART_BYTES + 12345, size - 1):
        flip_bit(file, place)
        found.add(unpacked.contents(file))
    assert len(found) == 6


@pytest.fixture
def hashed(tmp_path, own_cache, monkeypatch):
    """A file whose hash an earlier process kept."""
    monkeypatch.setattr(unpacked, "SETTLED_NS", 0)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    kept = unpacked.contents(file)
    monkeypatch.setattr(unpacked, "_hashed", {})
    return file, kept


def test_unchanged_file_is_not_hashed_again(hashed, monkeypatch):
    file, kept = hashed
    monkeypatch.setattr(unpacked, "hash_of", lambda _: pytest.fail("read again"))
    assert unpacked.contents(file) == kept


def test_recently_written_file_keeps_no_hash(tmp_path, own_cache):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    unpacked.contents(file)
    assert not [*own_cache.glob("hashes/*")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept.write_text("{"),
        lambda kept: kept.write_text('["/another", [], "0"]'),
        lambda kept: kept.write_text("7"),
        lambda kept: kept.chmod(0o666),
        lambda kept: kept.parent.chmod(0o777),
        lambda kept: (kept.unlink(), kept.symlink_to("/dev/zero")),
        lambda kept: (kept.unlink(), os.mkfifo(kept)),
    ],
    ids=["no JSON", "of another file", "a number", "others may write", "others may replace", "a link", "a pipe"],
)
def test_untrusted_kept_hash_is_not_used(hashed, own_cache, damage):
    file, kept = hashed
    (entry,) = own_cache.glob("hashes/*")
    edited = entry.read_text().replace(kept, "0" * 64)
    entry.write_text(edited)
    assert unpacked.contents(file) == "0" * 64  # else the test shows nothing
    unpacked._hashed.clear()
    damage(entry)
    assert unpacked.contents(file) == kept


def write_another_and_back(file):
    whole = file.read_bytes()
    flip_bit(file, -100)
    file.write_bytes(whole)


def replace_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda file: write(file, tiny_as("llama", seed=1)),
        lambda file: os.truncate(file, 3000),
        lambda file: file.unlink(),
        replace_by_a_pipe,
        write_another_and_back,
    ],
    ids=["another file", "its end cut off", "removed", "a pipe", "another file and back"],
)
def test_file_replaced_during_unpacking_is_refused(file, own_cache, monkeypatch, change):
    whole = gguf_model.write_model

    def write_and_replace(*args):
        tensors = whole(*args)
        change(file)
        return tensors

    monkeypatch.setattr(gguf_model, "write_model", write_and_replace)
    with refuses("was replaced while it was unpacked", "start again"):
        find(file)
    assert not [*own_cache.glob("model-*"), *own_cache.glob(".*.part")]


def test_files_differing_in_middle_have_different_fingerprints(tmp_path, own_cache):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(2**23))
    before = fingerprint(file)
    flip_bit(file, 2**22 + 999)
    assert fingerprint(file) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: flip_bit(directory / "tokenizer.json", -1000),
        lambda directory: os.truncate(directory / "tensors.json", 1000),
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "unpacked.json").write_text("{"),
        lambda directory: (directory / "model.safetensors").write_bytes(b""),
    ],
    ids=["a bit", "the end", "no config", "no record", "another file"],
)
def test_a_damaged_one_is_made_again(file, damage):
    directory = find(file)
    whole = contents(directory)
    damage(directory)
    with pytest.warns(GearbxWarning, match="is damaged or was changed; it is made again"):
        assert find(file) == directory
    assert contents(directory) == whole


def test_entry_of_other_source_is_replaced(file):
    directory = find(file)
    record = json.loads((directory / "unpacked.json").read_bytes())
    edit(directory / "unpacked.json", source="0" * 64)
    with pytest.warns(GearbxWarning, match="is made again"):
        find(file)
    assert json.loads((directory / "unpacked.json").read_bytes()) == record


@pytest.mark.parametrize("name", ["", "tensors.json", "config.json"])
def test_entry_writable_by_others_is_refused(file, name):
    place = find(file) / name
    place.chmod(place.stat().st_mode | 0o020)
    with pytest.raises(GearbxError, match=r"model: .*others may write to .*; run chmod go-w on it$"):
        find(file)


def test_entry_is_reused_with_any_umask(file, monkeypatch):
    before = os.umask(0)
    try:
        directory = find(file)
    finally:
        os.umask(before)
    monkeypatch.setattr(unpacked, "make", lambda *_: pytest.fail("unpacked again"))
    assert find(file) == directory


def test_files_of_killed_process_are_removed_at_start(file, own_cache):
    left = own_cache / ".other-0123456789abcdef.ab_cd123.part"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(99))
    with new_directory(own_cache / "in-work") as in_work:
        find(file)
        assert not left.exists()
        assert in_work.is_dir()


def test_full_disk_error_names_cache(file, own_cache, monkeypatch):

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf_model, "write_tokenizer", full)
    with refuses("in the cache: cannot be written (No space left on device); make room", "XDG_CACHE_HOME"):
        find(file)
    assert not [*own_cache.glob("model-*"), *own_cache.glob(".*.part")]


def test_bad_file_leaves_no_entry(file, own_cache):
    os.truncate(file, 3000)
    with pytest.raises(GearbxError, match=r"model\.gguf: damaged or truncated"):
        find(file)
    assert not [*own_cache.glob("model-*"), *own_cache.glob(".*.part")]
