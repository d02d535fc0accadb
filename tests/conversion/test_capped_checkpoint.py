"""A precision manifest in a geared checkpoint tells a controller which layers to cap first, as with the original."""

import json
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest


@dataclass
class Files:
    manifest: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A manifest of the demo model's attention, and a checkpoint with it inside."""
    path = tmp_path_factory.mktemp("capped")
    made = Files(path / "manifest.json", path / "geared")
    run = {name: import_module(f"gearbx_mlx.{name}").main for name in ("sensitivity", "convert")}
    small = ["--num-samples", "1", "--sequence-length", "16", "--bits", "4,5,6,8", "--manage", "attention"]
    call(run["sensitivity"], "sensitivity", *small, "--out", str(made.manifest))
    content = json.loads(made.manifest.read_text())
    content["layers"]["model.layers.2.self_attn.q_proj"]["min_bits"] = 8
    made.manifest.write_text(json.dumps(content))
    call(
        run["convert"],
        "convert",
        "--manifest",
        str(made.manifest),
        "--gears",
        "4,5,6,8",
        "--mlx-path",
        str(made.checkpoint),
    )
    return made


def call(main, name, *arguments):
    before, sys.argv = sys.argv, [f"gearbx_mlx.{name}", *arguments]
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code in (0, None)
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--manifest", "{other}"], "{other}: made for another model"),
        (["--target-tps", "5", "--manifest", "{other}"], "{other}: made for another model"),
    ],
)
def test_what_a_checkpoint_does_not_have_is_refused_in_a_line(files, command, tmp_path, flags, message):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(files.manifest.read_text()) | {"fingerprint": "0" * 32}))
    names = {"model": files.checkpoint, "manifest": files.manifest, "other": other}
    done = command("generate", "--model", files.checkpoint, *(flag.format(**names) for flag in flags))
    assert done.status == 2
    assert done.err.startswith(f"error: {message.format(**names)}")
    assert done.err.count("\n") == 1


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
    refused = command("generate", "--model", files.checkpoint, *flags)
    assert refused.status == 2
    assert "3 bits" in refused.err
