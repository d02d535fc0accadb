"""A precision manifest in a geared checkpoint tells a controller which layers to cap first, as with the original."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutations import edit
from refusals import assert_refused

from gearbx_mlx import convert


@dataclass
class Files:
    manifest: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A manifest of the demo model's attention, and a checkpoint with it inside."""
    path = tmp_path_factory.mktemp("capped")
    made = Files(path / "manifest.json", path / "geared")
    small = "--num-samples", "1", "--sequence-length", "16", "--bits", "4,5,6,8", "--manage", "attention"
    measure = [sys.executable, "-m", "gearbx_mlx.sensitivity", *small, "--out", str(made.manifest)]
    subprocess.run(measure, check=True, capture_output=True)
    edit(made.manifest, lambda content: content["layers"]["model.layers.2.self_attn.q_proj"].update(min_bits=8))
    convert(manifest=made.manifest, gears="4,5,6,8", mlx_path=made.checkpoint)
    return made


@pytest.mark.parametrize("flags", [(), ("--target-tps", "5")])
def test_a_manifest_of_another_model_is_refused_in_a_line(files, command, tmp_path, flags):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(files.manifest.read_text()) | {"fingerprint": "0" * 32}))
    done = command("generate", "--model", files.checkpoint, *flags, "--manifest", other)
    assert_refused(done, f"error: {other}: made for another model")


def test_tables_of_a_manifest_run_on_a_checkpoint_that_stores_their_bits(files, command, tmp_path):
    """The same bits in every layer and the same text as on the original."""
    content = json.loads(files.manifest.read_text())
    layers = {path: 8 if "q_proj" in path else 4 for path in content["layers"]}
    table = {"wish": "bpw 5", "bits": layers, "bits_per_weight": 5.0, "kl": 0.1}
    table |= {"perplexity_change": 1.0, "sum_of_parts": 0.1}
    manifest = tmp_path / "m.json"
    settings = "--mode static --gear 4 -m 12 --ignore-chat-template --verbose all"
    flags = ["--manifest", manifest, *settings.split()]
    manifest.write_text(json.dumps(content | {"gears": {"4": table}}))
    stored = command("generate", "--model", files.checkpoint, "--gears", "4,8", *flags)
    original = command("generate", "--gears", "4,8", *flags)
    assert (stored.status, original.status) == (0, 0), stored.err + original.err
    assert stored.out == original.out
    low = command("generate", "--model", files.checkpoint, "--gears", "4,8", *flags[2:])
    assert low.err != stored.err
    layers["model.layers.0.self_attn.q_proj"] = 3
    manifest.write_text(json.dumps(content | {"bits": [3, 4, 5, 6, 8], "gears": {"4": table}}))
    assert_refused(command("generate", "--model", files.checkpoint, *flags), "3 bits")
