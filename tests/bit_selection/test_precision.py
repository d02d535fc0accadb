"""The precision manifest: its rules, its file, and every possible mistake in it."""

import json

import jsonschema
import mlx_lm
import pytest
from msgspec.structs import replace
from mutations import replaced
from refusals import assert_refused

from gearbx_mlx import GearbxError, Ladder, load
from gearbx_mlx.bit_selection.precision import (
    SCHEMA_FILE,
    GearTable,
    LayerPrecision,
    PrecisionManifest,
    least_bits,
    parse_precision,
    read_precision,
)
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.gears.gearbox import model_fingerprint

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
KL = {3: 0.01, 4: 0.0025, 8: 0.0}


def manifest(**change) -> PrecisionManifest:
    layers = {
        UP: LayerPrecision("mlp", 100, 3, 16, KL, {3: 0.1, 4: 0.0, 8: 0.0}),
        DOWN: LayerPrecision("mlp", 300, 4, 8, KL),
    }
    gears = {4: GearTable({UP: 3, DOWN: 4}, "4.5 bits per weight", 4.25, 0.0125, 0.3, 0.0125)}
    text = "exact", "demo", "0" * 32, "ab", 7
    return replace(PrecisionManifest(*text, "affine", 64, "all", (3, 4, 8), 9.5, layers, gears), **change)


def content_of(made: PrecisionManifest) -> dict:
    return json.loads(made.as_json())


@pytest.fixture(scope="module")
def for_demo() -> dict:
    """A manifest of the demo model, with invented numbers; as JSON holds it."""
    model, _ = load()
    layers, _ = discover(model, "all", 64)
    held = {e.path: LayerPrecision("mlp", e.module.weight.size, 3, 16, KL) for e in layers}
    bits = {path: 3 + place % 2 for place, path in enumerate(held)}
    gears = {4: GearTable(bits, "", 4.0, 0.1, 0.1, 0.1)}
    return content_of(manifest(layers=held, fingerprint=model_fingerprint(model), gears=gears))


@pytest.mark.parametrize(
    ("kl", "change", "bits"),
    [
        ({4: 0.019, 6: 0.001, 8: 0.0}, {4: 0.4, 6: 0.1, 8: 0.0}, 4),
        ({4: 0.019, 6: 0.001, 8: 0.0}, {4: 0.5, 6: 0.1, 8: 0.0}, 6),  # 0.5 is not under it
        ({4: 0.02, 6: 0.001, 8: 0.0}, {4: 0.1, 6: 0.1, 8: 0.0}, 6),
        ({4: 0.05, 6: 0.001, 8: 0.0}, {4: 0.1, 6: 0.1, 8: 0.0}, 6),
        ({4: 0.051, 6: 0.001, 8: 0.0}, {4: 0.1, 6: 0.1, 8: 0.0}, 8),
        ({3: 0.019, 4: 0.005, 8: 0.0}, {3: 0.4, 4: 0.1, 8: 0.0}, 3),
        ({3: 0.021, 4: 0.005, 8: 0.0}, {3: 0.4, 4: 0.1, 8: 0.0}, 4),
        ({3: 0.01, 4: 0.005, 8: 0.0}, {3: -2.0, 4: 0.1, 8: 0.0}, 3),  # no rise
        ({4: 0.001, 8: 0.001}, {4: 9.0, 8: 9.0}, 8),  # none is good enough
        ({3: 0.01}, {}, 3),
    ],
)
def test_rules_of_the_document(kl, change, bits):
    """least_bits: perplexity under 0.5 %; KL at 4 bits under 0.02, to 0.05, above."""
    assert least_bits(kl, change) == bits


class TestFile:
    def test_round_trip_is_equal(self, tmp_path):
        made = manifest()
        (tmp_path / "m.json").write_text(made.as_json())
        assert read_precision(tmp_path / "m.json") == made

    def test_file_matches_schema(self, for_demo):
        schema = json.loads(SCHEMA_FILE.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(content_of(manifest()), schema)
        jsonschema.validate(for_demo, schema)

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("version",), 2),
            (("schema",), "another"),
            (("bits",), [3, 7]),
            (("layers",), {}),
            (("layers", UP, "min_bits"), 7),
            (("layers", UP, "kl"), {"4": -1.0}),
            (("layers", UP, "kl"), {"4": "much"}),
            (("layers", UP, "kl"), {"7": 0.1}),
            (("gears", "4", "bits"), {UP: 7}),
            (("gears", "4", "kl"), None),
        ],
    )
    def test_invalid_schema_is_refused(self, place, value):
        content = replaced(content_of(manifest()), place, value)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content, json.loads(SCHEMA_FILE.read_text()))
        with pytest.raises(GearbxError):
            parse_precision(content)

    def test_tables_of_a_ladder(self):
        assert manifest().tables(Ladder.parse("4,8,16")) == {"low": {UP: 3, DOWN: 4}}
        assert manifest().tables(Ladder.parse("3,16")) == {}


def test_controller_receives_ranges_and_costs():
    made = manifest()
    assert made.bounds == {UP: (3, 16), DOWN: (4, 8)}
    assert [made.sensitivity(UP, bits) for bits in (3, 4, 8, 16)] == [0.01, 0.0025, 0.0, 0.0]
    assert made.sensitivity(UP, 2) == pytest.approx(0.04)  # fourfold
    assert made.sensitivity("another", 8) > made.sensitivity(UP, 2)


class TestGenerate:
    def run(self, command, tmp_path, content, *arguments):
        file = tmp_path / "m.json"
        file.write_text(json.dumps(content))
        return command("generate", "--manifest", file, "-m", 8, *arguments)

    def test_shifts_tables(self, succeeds, tmp_path, for_demo):
        trace, summary = tmp_path / "t.jsonl", tmp_path / "s.json"
        arguments = ("--gears", "4,16", "--gear", "low", "--thresholds", "11", "--summary", summary)
        self.run(succeeds, tmp_path, for_demo, *arguments, "--trace", trace)
        weights = {path: layer["weights"] for path, layer in for_demo["layers"].items()}
        bits = for_demo["gears"]["4"]["bits"]
        read = sum(weights[path] * (bits[path] + 0.5) for path in bits) / sum(weights.values())
        assert json.loads(summary.read_text())["effective_bits_per_weight"] == pytest.approx(read)

    @pytest.mark.parametrize(
        ("place", "value", "told"),
        [
            (("fingerprint",), "f" * 32, "made for a model with different weights (demo)"),
            (("version",), 9, "has version 9, and this gearbx-mlx reads 1"),
            (("layers", "model.layers.9.mlp.up_proj"), None, "mlp.up_proj, which is not a layer of this"),
            (("layers", UP, "min_bits"), 16, f'layers["{UP}"]: min_bits is 16 and max_bits 8; use an ascending range'),
            (("layers", UP, "kl"), {"4": float("nan")}, "NaN is not a finite number"),
            (("layers", UP, "perplexity_change"), {"4": float("inf")}, "Infinity is not a finite number"),
            (("gears", "4", "bits"), {"nowhere": 4}, 'the table of gear 4 has "nowhere"'),
            (("gears", "4", "bits"), {UP: 7}, f'gears["4"].bits["{UP}"] is 7, not one of 2, 3, 4, 5, 6, 8, 16'),
        ],
    )
    def test_bad_manifests_are_refused(self, command, tmp_path, for_demo, place, value, told):
        narrow = replaced(for_demo, ("layers", UP, "max_bits"), 8)
        content = replaced(narrow, place, narrow["layers"][UP] if value is None else value)
        assert_refused(self.run(command, tmp_path, content), tmp_path / "m.json", told)

    def test_conflicting_flags_are_refused(self, command, tmp_path, for_demo):
        result = self.run(command, tmp_path, for_demo, "--format", "planes")
        assert_refused(result, "--format: ", "was measured with affine, got planes; omit --format")
        assert_refused(command("generate", "--manifest", tmp_path / "none.json"), "none.json: cannot be read")


class TestConvert:
    def test_mlx_lm_loads_output(self, succeeds, tmp_path, for_demo):
        file, out = tmp_path / "m.json", tmp_path / "mixed"
        content = replaced(for_demo, ("gears", "4", "bits", DOWN), 16)
        file.write_text(json.dumps(content))
        result = succeeds("convert", "--manifest", file, "--mlx-path", out)
        assert result.out == f"{out}\n"
        model, tokenizer = mlx_lm.load(str(out))
        modules = dict(model.named_modules())
        found = {path: getattr(modules[path], "bits", 16) for path in content["layers"]}
        assert found == content["gears"]["4"]["bits"]
        assert mlx_lm.generate(model, tokenizer, "Tom has", max_tokens=4)
        card = (out / "README.md").read_text()
        weights = {path: modules[path].weight.size * 32 // bits for path, bits in found.items() if bits != 16}
        weights[DOWN] = modules[DOWN].weight.size
        read = sum(weights[path] * (bits + (0.5 if bits != 16 else 0)) for path, bits in found.items())
        assert f"{read / sum(weights.values()):.2f} bits per weight" in card
        assert f"| 16 | {list(found.values()).count(16)} |" in card

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--format", "planes"), "are stored as affine"),
            (("--gears", "8"), "has no table for gears 8; choose from 4"),
            (("--q-group-size", 32), "--q-group-size: must be"),
            (("--manage", "mlp"), "omit --dtype, --manage and --embeddings"),
            (("--target-bpw", 4), "omit the floors and the budget"),
        ],
    )
    def test_incompatible_flags_are_refused(self, command, tmp_path, for_demo, arguments, told):
        file = tmp_path / "m.json"
        file.write_text(json.dumps(for_demo))
        assert_refused(command("convert", "--manifest", file, "--mlx-path", tmp_path / "out", *arguments), told)
        assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
