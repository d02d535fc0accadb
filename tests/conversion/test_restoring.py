"""convert --restore gives back the original's files byte for byte, whatever the model's class does to its tensors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import contents, normal, save_model, tiny_model, weights_of
from refusals import assert_refused

import gearbx_mlx
from gearbx_mlx import Gearbox
from gearbx_mlx.errors import escaped
from gearbx_mlx.gears.manifest import ORIGINAL_FILE
from gearbx_mlx.gears.tensor_files import header_of
from gearbx_mlx.loading import DEMO_MODEL

Weights = dict[str, mx.array]
INV_FREQ = "self_attn.rotary_emb.inv_freq"


def unstacked(weights: Weights, stacked: str, single: str) -> Weights:
    """Separate experts, as mixtures are published. stacked: ends the path of all; single: with {} for the number."""
    found = {}
    for name, array in weights.items():
        before, is_stack, after = name.partition(stacked)
        if is_stack:
            found |= {f"{before}{single.format(e)}{after}": matrix for e, matrix in enumerate(array)}
        else:
            found[name] = array
    return found


def joined(weights: Weights, gate: str, join) -> Weights:
    """The up projection beside the gate's. gate: a pattern of its path, with a group for what comes before."""
    found = dict(weights)
    for name in weights:
        match = re.fullmatch(gate, name)
        if match:
            new, value = join(match[1], found.pop(name), found.pop(name.replace("gate_proj", "up_proj")))
            found[new] = value
    return found


def mixtral(weights: Weights) -> Weights:
    renamed = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    found = unstacked(weights, "switch_mlp.", "experts.{}.")
    return {
        re.sub(r"(experts\.\d+\.)(\w+)", lambda m: m[1] + renamed[m[2]], name): array for name, array in found.items()
    }


def qwen3_vl_moe(weights: Weights) -> Weights:
    """Rows of gate and up are columns side by side; mlx-lm does not read the vision tower."""

    def join(path: str, gate: mx.array, up: mx.array) -> tuple[str, mx.array]:
        return f"{path}.experts.gate_up_proj", mx.concatenate([gate, up], axis=-2).swapaxes(-1, -2)

    found = joined(weights, r"(.*\.mlp)\.switch_mlp\.gate_proj\.weight", join)
    for name in list(found):
        if name.endswith("switch_mlp.down_proj.weight"):
            new = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
            found[new] = found.pop(name).swapaxes(-1, -2)
    return found | {"visual.patch_embed.weight": normal(8, 3, 2, 2).astype(mx.bfloat16)}


def gpt_oss(weights: Weights) -> Weights:
    """Rows of gate and up alternate."""

    def join(path: str, gate: mx.array, up: mx.array) -> tuple[str, mx.array]:
        name = "gate_up_proj.weight" if gate.ndim == 3 else "gate_up_proj_bias"
        return f"{path}.{name}", mx.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])

    found = joined(weights, r"(.*\.experts)\.gate_proj\.(?:weight|bias)", join)
    return {name.replace("down_proj.bias", "down_proj_bias"): array for name, array in found.items()}


def gpt2(weights: Weights) -> Weights:
    """Transposed matrices, and masks that no parameter has."""
    wide = re.compile(r".*(c_attn|c_proj|c_fc)\.weight")
    found = {name.removeprefix("model."): array.T if wide.fullmatch(name) else array for name, array in weights.items()}
    return found | {"h.0.attn.bias": mx.tri(16).reshape(1, 1, 16, 16)}


def mamba(weights: Weights) -> Weights:
    return {name: array.moveaxis(2, 1) if "conv1d.weight" in name else array for name, array in weights.items()}


def deepseek_v3(weights: Weights) -> Weights:
    """Keys and values of all heads in one matrix, of which no parameter is a part; separate experts."""
    found = unstacked(weights, "switch_mlp.", "experts.{}.")
    for name in [name for name in found if "embed_q" in name]:
        keys, values = found.pop(name).swapaxes(-1, -2), found.pop(name.replace("embed_q", "unembed_out"))
        both = mx.concatenate([keys, values], axis=1).reshape(-1, keys.shape[-1])
        found[name.replace("embed_q", "kv_b_proj")] = both
    return found


def llama(weights: Weights) -> Weights:
    """A head that repeats the embedding, and values that every start computes again."""
    return weights | {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        f"model.layers.0.{INV_FREQ}": normal(16),
    }


PUBLISHED = {
    "mixtral": (mixtral, {}, ""),
    "qwen3_moe": (lambda weights: unstacked(weights, "switch_mlp.", "experts.{}."), {}, ""),
    "qwen3_vl_moe": (qwen3_vl_moe, {}, r"visual\.patch_embed\.weight"),
    "gpt_oss": (gpt_oss, {}, ""),
    "gpt2": (gpt2, {}, r"h\.0\.attn\.bias"),
    "mamba": (mamba, {}, ""),
    "deepseek_v3": (deepseek_v3, {}, r".*kv_b_proj\.weight"),
    "llama": (llama, {"tie_word_embeddings": True}, r".*inv_freq"),
    "gemma3_text": (lambda weights: weights, {}, ""),
    "phi3": (lambda weights: weights, {}, ""),
    "falcon_h1": (mamba, {}, r".*(_proj|lm_head|embed_tokens)\.weight"),  # its class multiplies them by numbers
}


def kept(directory: Path) -> set[str]:
    """The tensors that a checkpoint stores as they were."""
    names = header_of(directory / ORIGINAL_FILE).entries
    return {name.split("/", 2)[2] for name in names if name.startswith("tensor/")}


def publish(directory: Path, weights: Weights, shards: int = 1) -> None:
    """Replace the weights in a directory, in one file or several with an index; and add a license."""
    (directory / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        own = names[i::shards]
        mx.save_safetensors(str(directory / file), {name: weights[name] for name in own}, {"format": "pt"})
        index |= dict.fromkeys(own, file)
    if shards > 1:
        content = {"metadata": {}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    (directory / "LICENSE").write_text("Do what you like.\n")


def exact(folder: Path, model: nn.Module, weights: Weights, shards: int = 1) -> Path:
    """Publish these weights of a model as `original` in a folder, and convert them to `geared` there."""
    save_model(model, folder / "original")
    publish(folder / "original", weights, shards)
    how = {"gears": "4,16", "format": "exact", "q_group_size": 32}
    return gearbx_mlx.convert(folder / "original", folder / "geared", **how)


def assert_restored(geared: Path) -> None:
    restored = gearbx_mlx.convert(restore=geared, mlx_path=geared.with_name("restored"))
    assert contents(restored) == contents(geared.with_name("original"))


@pytest.mark.some(3)
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_every_file_comes_back(architecture, tmp_path):
    change, fields, as_they_were = PUBLISHED[architecture]
    model = tiny_model(architecture, dtype=mx.bfloat16, **fields)
    geared = exact(tmp_path, model, change(weights_of(model)), shards=2)
    assert {name for name in kept(geared) if not re.fullmatch(as_they_were, name)} == set()
    assert bool(kept(geared)) == bool(as_they_were)
    assert_restored(geared)


def test_the_demo_model_comes_back_through_the_command(tmp_path, succeeds):
    succeeds("convert", "--format", "exact", "--gears", "4,16", "--mlx-path", tmp_path / "geared")
    done = succeeds("convert", "--restore", tmp_path / "geared", "--mlx-path", tmp_path / "restored")
    assert done.out == f"{tmp_path / 'restored'}\n"
    assert contents(tmp_path / "restored") == contents(DEMO_MODEL)


def odd_weights(model) -> Weights:
    """NaN with several patterns, infinities, zeros of both signs and subnormal numbers."""
    weights = weights_of(model)
    name = "model.layers.0.mlp.up_proj.weight"
    bits = np.array(weights[name].view(mx.uint16))
    bits[0, :8] = [0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001]
    bits[3] = 0
    weights[name] = mx.array(bits).view(mx.bfloat16)
    weights["model.norm.weight"] = mx.full(64, 1.5, mx.bfloat16).at[0].add(float("nan"))
    return weights


def test_nan_weights_return_and_are_zero_when_low(tmp_path):
    model = tiny_model(dtype=mx.bfloat16)
    geared = exact(tmp_path, model, odd_weights(model) | {"model.norm.weight": mx.ones(64, mx.bfloat16)})
    assert_restored(geared)
    model, _ = gearbx_mlx.load(geared)
    gearbox = Gearbox(model, kernels="mlx")
    layer = model.model.layers[0].mlp.up_proj
    low = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    assert not mx.any(low[0, :32]).item()
    assert mx.any(low[0, 32:]).item()
    assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all().item()
    gearbox.shift(16)
    assert mx.isnan(model(mx.array([[1, 2, 3]]))).any().item()


def test_tensors_of_every_type_and_size_come_back(tmp_path):
    """Tensors that mlx-lm drops may hold anything, and a norm may have NaN."""
    model = tiny_model(dtype=mx.bfloat16, tie_word_embeddings=True)
    types = [mx.bool_, mx.int64, mx.float32, mx.float16, mx.uint8, mx.complex64]
    others = {f"model.layers.{i}.{INV_FREQ}": mx.ones((3, i + 1), dtype) for i, dtype in enumerate(types)}
    assert_restored(exact(tmp_path, model, odd_weights(model) | others | {f"model.{INV_FREQ}": mx.array(2.0)}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a small mixture with a vision tower; its original beside it."""
    model = tiny_model("qwen3_vl_moe", dtype=mx.bfloat16)
    return exact(tmp_path_factory.mktemp("whole"), model, qwen3_vl_moe(weights_of(model)), shards=3)


KILLED = """
import itertools, os, signal, sys
from gearbx_mlx.conversion.converter import Converter
from gearbx_mlx.conversion.original import Restorer
from gearbx_mlx.convert import main

name, last = sys.argv.pop(1), int(sys.argv.pop(1))
owner = {"_write": Converter, "tensors": Restorer}.get(name, os)
function, count = getattr(owner, name), itertools.count()


def killed(*arguments):
    if next(count) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments)


setattr(owner, name, killed)
main()
"""


def kill(function: str, call: int, *arguments: object) -> None:
    """Start a conversion that is killed as it calls a function for the n-th time, counted from 0."""
    killed = [sys.executable, "-c", KILLED, function, str(call), "--device", "cpu", *map(str, arguments)]
    done = subprocess.run(killed, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "call"), [("_write", 0), ("_write", 7), ("fsync", 0), ("replace", 0)])
def test_a_kill_of_a_conversion(checkpoint, tmp_path, command, function, call):
    """A directory is there with everything or not at all, and the same command begins again."""
    out = tmp_path / "geared"
    arguments = ["--model", checkpoint.with_name("original"), "--mlx-path", out, "--gears", "4,16"]
    arguments += ["--format", "exact", "--q-group-size", 32]
    kill(function, call, *arguments)
    (half,) = tmp_path.iterdir()
    assert half.name.startswith(".geared.")
    assert command("convert", *arguments).status == 0
    assert [*tmp_path.iterdir()] == [out]
    assert contents(out) == contents(checkpoint)


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory) -> Path:
    """A checkpoint of a tiny model; its original in two shards beside it."""
    model = tiny_model(dtype=mx.bfloat16)
    return exact(tmp_path_factory.mktemp("whole"), model, weights_of(model), shards=2)


@pytest.mark.parametrize("restores", [False, True])
def test_files_are_synced_before_directory_rename(two_shards, tmp_path, monkeypatch, restores):
    """Otherwise a power failure leaves empty files in a directory that looks whole."""
    synced, fsync, replace = set(), os.fsync, os.replace
    before = []
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.add(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (before.append({*synced}), replace(*paths)))
    made = {"restore": two_shards} if restores else {"hf_path": two_shards.with_name("original"), "gears": "4,16"}
    out = gearbx_mlx.convert(**made, mlx_path=tmp_path / "out")
    assert [file.name for file in (out, *out.iterdir()) if file.stat().st_ino not in before[-1]] == []


class TestOddNames:
    @pytest.mark.parametrize("shard", ["model (1).safetensors", "model é+&%.safetensors"])
    def test_a_shard_and_a_note(self, two_shards, tmp_path, succeeds, shard):
        """A file whose name cannot be in gears.json does not come back; the others do."""
        original = Path(shutil.copytree(two_shards.with_name("original"), tmp_path / "original"))
        (original / "model-00002-of-00002.safetensors").rename(original / shard)
        (original / "my notes (2).txt").write_text("mine")
        wanted = contents(original)
        (original / "odd\x07.txt").write_text("odd")
        (original / "back\\slash.md").write_text("odd")
        flags = "--model", original, "--format", "exact", "--gears", "4,16", "--q-group-size", 32
        done = succeeds("convert", *flags, "--mlx-path", tmp_path / "geared")
        assert r"--restore will not restore back\slash.md, odd\x07.txt" in done.err.replace("\n", " ")
        assert str(original) not in done.err
        succeeds("convert", "--restore", tmp_path / "geared", "--mlx-path", tmp_path / "restored")
        assert contents(tmp_path / "restored") == wanted

    @pytest.mark.parametrize("shard", ["model\x07.safetensors", "model\\1.safetensors"])
    def test_unrestorable_shard_is_refused(self, two_shards, tmp_path, command, shard):
        original = Path(shutil.copytree(two_shards.with_name("original"), tmp_path / "original"))
        (original / "model-00002-of-00002.safetensors").rename(original / shard)
        done = command("convert", "--model", original, "--format", "exact", "--mlx-path", tmp_path / "out")
        assert_refused(done, original, escaped(shard), "use a different name")
        assert [file.name for file in tmp_path.iterdir()] == ["original"]


@pytest.mark.parametrize("command_flag", ["--restore", "--verify"])
def test_revision_matches_checkpoint(two_shards, tmp_path, command, monkeypatch, command_flag):
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> Path:
        asked.append((name, revision))
        return two_shards

    monkeypatch.setattr("gearbx_mlx.loading.snapshot_download", download)
    name = f"somebody/geared{command_flag}"  # a process looks a name up once
    flags = command_flag, name, "--revision", "v2", "--mlx-path", tmp_path / "out"
    assert command("convert", *flags).status == 0
    assert asked == [(name, "v2")]
