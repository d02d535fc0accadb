"""docs/files.md and docs/python.md describe every field that is written, and no other."""

import dataclasses
import json
import re
import sys
from importlib import import_module
from types import SimpleNamespace

import msgspec
import pytest
from documents import PAGES, described_fields
from mlx_lm.generate import GenerationResponse

from gearbx_mlx import GearResponse, evaluate
from gearbx_mlx.bit_selection.precision import PrecisionManifest
from gearbx_mlx.convert import convert
from gearbx_mlx.decoding.modes import MODES
from gearbx_mlx.gears.manifest import Manifest
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.gates import ThresholdFile


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The summary and the trace of a run in every mode."""
    exact = convert(mlx_path=tmp_path_factory.mktemp("exact") / "exact", gears="4,16", format="exact")
    modes = dict.fromkeys(MODES, ()) | {
        "static": ("--draft-model", DEMO_MODEL),
        "route": ("--target-tps", "5"),
        "pair": ("--small-model", DEMO_MODEL),
        "kickdown": ("--kv-gears", "4,16"),
        "lossless": ("--model", exact, "--residency", "stream"),
    }
    tale = "--ignore-chat-template", "--prompt", "Once upon a time", "--max-tokens", "60"  # enough to try both ways
    found = []
    named = [("--mode", mode, *flags) for mode, flags in modes.items()]
    for flags in [*named, tale, ("--gear", "low")]:
        path = tmp_path_factory.mktemp("run")
        command = ["generate", "--max-tokens", "12", *flags, "--trace", path / "t.jsonl", "--summary", path / "s.json"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [*map(str, command)])
            if flags is tale:
                patch.setenv("GEARBX_TUNE", "1")  # or drafts have a fixed length, and nothing is timed
            with pytest.raises(SystemExit) as stopped:
                import_module("gearbx_mlx.generate").main()
        assert not stopped.value.code
        records = [json.loads(line) for line in (path / "t.jsonl").read_text(encoding="utf-8").splitlines()]
        found.append(SimpleNamespace(summary=json.loads((path / "s.json").read_text()), records=records))
    return found


@pytest.mark.docs
@pytest.mark.slow
def test_every_field_of_the_summary_is_described(runs):
    assert {name for run in runs for name in run.summary} == described_fields("The summary")


@pytest.mark.docs
def test_every_field_of_the_trace_is_described(runs):
    written = {name for run in runs for record in run.records for name in record}
    assert written | {"prompt"} == described_fields("The trace")  # analyze adds the prompt


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Thresholds", ThresholdFile),
        ("gears.json", Manifest),
        ("The precision manifest", PrecisionManifest),
    ],
)
def test_every_field_of_a_file_is_described(heading, kind):
    assert {item.encode_name for item in msgspec.structs.fields(kind)} == described_fields(heading)


@pytest.mark.docs
@pytest.mark.slow
def test_every_field_of_an_evaluation_is_described(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had three sons. The eldest was proud.", encoding="utf-8")
    report = evaluate(text, gears="4,16", tokens=12, context=12, out=tmp_path / "evaluation")
    assert report.keys() == described_fields("Evaluations")
    assert {name for row in report["rows"] for name in row} == described_fields("Evaluations", table=1)


def test_every_field_of_a_response_is_described():
    own = {item.name for item in dataclasses.fields(GearResponse)} - {
        item.name for item in dataclasses.fields(GenerationResponse)
    }
    section = PAGES["docs/python.md"].read_text(encoding="utf-8").split("## Responses")[1].split("## Gears")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert own == set(re.findall(r"`(\w+)`", " ".join(cells)))
