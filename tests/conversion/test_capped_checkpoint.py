"""A precision manifest in a geared checkpoint: its tables run there as on the original, and on no other model's."""

import json

from mutations import edit
from refusals import assert_refused

from gearbx_mlx import convert

SMALL = "--num-samples", 1, "--sequence-length", 16, "--bits", "4,5,6,8", "--manage", "attention"


def test_manifest_tables_run_on_their_checkpoint(command, succeeds, tmp_path):
    """The same bits in every layer and the same text as on the original."""
    manifest, checkpoint = tmp_path / "m.json", tmp_path / "geared"
    succeeds("sensitivity", *SMALL, "--out", manifest)
    convert(manifest=manifest, gears="4,5,6,8", mlx_path=checkpoint)
    layers = {path: 8 if "q_proj" in path else 4 for path in json.loads(manifest.read_text())["layers"]}
    table = {"wish": "bpw 5", "bits": layers, "bits_per_weight": 5.0, "kl": 0.1}
    table |= {"perplexity_change": 1.0, "sum_of_parts": 0.1}
    edit(manifest, gears={"4": table})
    flags = ["--mode", "static", "--gear", "4", "-m", "12", "--ignore-chat-template", "--verbose", "all"]
    stored = succeeds("generate", "--model", checkpoint, "--gears", "4,8", "--manifest", manifest, *flags)
    original = succeeds("generate", "--gears", "4,8", "--manifest", manifest, *flags)
    assert stored.out == original.out
    low = command("generate", "--model", checkpoint, "--gears", "4,8", *flags)
    assert low.err != stored.err
    layers["model.layers.0.self_attn.q_proj"] = 3
    edit(manifest, bits=[3, 4, 5, 6, 8], gears={"4": table})
    given = "generate", "--model", checkpoint, "--manifest", manifest
    assert_refused(command(*given, *flags), "tables' bits, got 3;")
    edit(manifest, fingerprint="0" * 32)
    for more in ((), ("--target-tps", "5")):
        assert_refused(command(*given, *more), f"error: {manifest}: made for a model with different weights")
