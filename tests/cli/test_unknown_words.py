"""A word that nobody knows ends in one line, with the nearest name where one is near."""

import shlex
import sys

import pytest
from http_server import error_of, served
from refusals import refuses

from gearbx_mlx import Gearbox, calibrate, stream_generate
from gearbx_mlx.__main__ import main
from gearbx_mlx.chat import parse_mode
from gearbx_mlx.machine.sensors import Scripted

UNKNOWN = {
    # commands
    "chta": "chta: no such command; did you mean chat?",
    "'ch\nat'": r"ch\nat: no such command; did you mean chat?",
    "genrate": "genrate: no such command; did you mean generate?",
    "xyz": "xyz: no such command; choose from generate, chat, ",
    "benchmark mca": "benchmark: unknown, got mca; did you mean mac?",
    "benchmark energy": "benchmark: unknown, got energy; choose from decode, mac",
    # flags, also before one that is missing
    "benchmark decode --jsn x": "--jsn: not a flag; did you mean --json?",
    "generate --max-tokns 5": "--max-tokns: not a flag; did you mean --max-tokens?",
    "generate --modle smollm2": "--modle: not a flag; did you mean --model?",
    "generate --json": "--json: not a flag; did you mean --summary FILE.json?",
    "generate '--mo\nde'": r"--mo\nde: not a flag; did you mean --mode?",
    "generate --wings 2": "--wings: not a flag; ",
    "server --prot=80": "--prot=80: not a flag; did you mean --port?",
    "evaluate --dta x": "--dta: not a flag; did you mean --data?",
    "list --directry .": "--directry: not a flag; did you mean --directory?",
    "generate -z": "-z: not a flag; ",
    # modes, formats, choices
    "generate --mode losless": "--mode: unknown, got losless; did you mean lossless?",
    "generate --mode 'loss\nless'": r"--mode: unknown, got loss\nless; did you mean lossless?",
    "generate --residency 'di\nsk'": r"--residency: unknown, got di\nsk; did you mean disk?",
    "generate --mode fast": "--mode: unknown, got fast; choose from route, kickdown, lossless, ",
    "generate --format plane": "--format: unknown, got plane; did you mean planes?",
    "generate --format codebok:sigma=3": "--format: unknown, got codebok; did you mean codebook?",
    "generate --format codebook:sigm=3": "no choice 'sigm=3' in 'sigm=3'; did you mean sigma?",
    "convert --format nf4": "--format: unknown, got nf4; choose from planes, affine, ",
    "convert --manage atention": "--manage: unknown, got atention; did you mean attention?",
    "generate --residency dsk": "--residency: unknown, got dsk; did you mean disk?",
    "generate --kernels nativ": "--kernels: unknown, got nativ; did you mean native?",
    "generate --kernels auto:flot": "--kernels auto:flot: activations: unknown, got flot; did you mean float?",
    "generate --dtype float3": "--dtype: unknown, got float3; did you mean float32?",
    "generate --device cup": "--device: unknown, got cup; did you mean cpu?",
    "generate --verbose al": "--verbose: unknown, got al; did you mean all?",
    "sensitivity --kernels nativ": "--kernels: unknown, got nativ; did you mean native?",
    "cache --empty kernel": "--empty: unknown, got kernel; did you mean kernels?",
}


@pytest.mark.parametrize("line", UNKNOWN, ids=str)
def test_word_of_a_command_line_is_refused(line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gearbx_mlx", *shlex.split(line)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert "error: " in shown.err
    assert UNKNOWN[line] in shown.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["losless"], "--mode: unknown, got losless; did you mean lossless?"),
        (["route", "--thresholdz", "1,2"], "/mode: --thresholdz: not a flag; did you mean --thresholds?"),
        (["route", "--wings", "1,2"], "/mode: --wings: not a flag; gearbx_mlx chat --help shows the flags"),
    ],
)
def test_word_after_mode_of_a_chat_is_refused(flags, said):
    with refuses(said):
        parse_mode(flags[0], flags[1:])


def test_keyword_of_a_program_is_refused(demo, tiny):
    with refuses("no keyword 'max_token'; did you mean max_tokens?"):
        next(stream_generate(demo.model, demo.tokenizer, "Once", max_token=5))
    with refuses("num_prompt: no such setting; did you mean num_prompts?"):
        calibrate(num_prompt=3)
    for keywords, said in (
        ({"format": "plane"}, "format 'plane' does not exist; did you mean planes?"),
        ({"residency": "dsk"}, "residency: unknown, got dsk; did you mean disk?"),
        ({"manage": "atention"}, "manage: unknown, got atention; did you mean attention?"),
    ):
        with refuses(said):
            Gearbox(tiny, **keywords)


def test_field_of_a_file_is_refused(tmp_path):
    script = tmp_path / "machine.jsonl"
    script.write_text('{"second": 0}\n')
    with refuses(script, "line 1: second is not known; did you mean seconds?"):
        Scripted.from_file(script)


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16") as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gearbx": {"thresholdz": [1.0]}}, 'gearbx: "thresholdz" is not known; did you mean thresholds?'),
        ({"gearbx": {"wings": 2}}, 'gearbx: "wings" is not known; choose from mode, gear, thresholds, draft'),
        ({"mode": "losless"}, "mode 'losless' is not served here; did you mean lossless?"),
        ({"gearbx": {"mode": "statik"}}, "mode 'statik' is not served here; did you mean static?"),
    ],
    ids=str,
)
def test_field_of_a_request_is_refused(client, path, fields, said):
    body = {"prompt": "Once", "messages": [{"role": "user", "content": "Once"}], **fields}
    assert said in error_of(client.post(path, json=body))
