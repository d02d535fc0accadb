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
    "benchmark mca": "benchmark is mca; did you mean mac?",
    "benchmark energy": "benchmark is energy; choose from decode, mac",
    # flags, also before one that is missing
    "benchmark decode --jsn x": "--jsn is no flag; did you mean --json?",
    "generate --max-tokns 5": "--max-tokns is no flag; did you mean --max-tokens?",
    "generate --modle smollm2": "--modle is no flag; did you mean --model?",
    "generate --json": "--json is no flag; did you mean --summary FILE.json?",
    "generate '--mo\nde'": r"--mo\nde is no flag; did you mean --mode?",
    "generate --wings 2": "--wings is no flag; ",
    "server --prot=80": "--prot=80 is no flag; did you mean --port?",
    "evaluate --dta x": "--dta is no flag; did you mean --data?",
    "list --directry .": "--directry is no flag; did you mean --directory?",
    "generate -z": "-z is no flag; ",
    # modes, formats, choices
    "generate --mode losless": "--mode is losless; did you mean lossless?",
    "generate --mode 'loss\nless'": r"--mode is loss\nless; did you mean lossless?",
    "generate --residency 'di\nsk'": r"--residency is di\nsk; did you mean disk?",
    "generate --mode fast": "--mode is fast; choose from route, kickdown, lossless, ",
    "generate --format plane": "--format is plane; did you mean planes?",
    "generate --format codebok:sigma=3": "--format is codebok; did you mean codebook?",
    "generate --format codebook:sigm=3": "no option 'sigm=3' in 'sigm=3'; did you mean sigma?",
    "convert --format nf4": "--format is nf4; choose from planes, affine, ",
    "convert --manage atention": "--manage is atention; did you mean attention?",
    "generate --residency dsk": "--residency is dsk; did you mean disk?",
    "generate --kernels nativ": "--kernels is nativ; did you mean native?",
    "generate --kernels auto:flot": "--kernels auto:flot: activations is flot; did you mean float?",
    "generate --dtype float3": "--dtype is float3; did you mean float32?",
    "generate --device cup": "--device is cup; did you mean cpu?",
    "generate --verbose al": "--verbose is al; did you mean all?",
    "sensitivity --kernels nativ": "--kernels is nativ; did you mean native?",
    "cache --empty kernel": "--empty is kernel; did you mean kernels?",
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
        (["losless"], "--mode is losless; did you mean lossless?"),
        (["route", "--thresholdz", "1,2"], "/mode: --thresholdz is no flag; did you mean --thresholds?"),
        (["route", "--wings", "1,2"], "/mode: --wings is no flag; gearbx_mlx chat --help shows the flags"),
    ],
)
def test_word_after_mode_of_a_chat_is_refused(flags, said):
    with refuses(said):
        parse_mode(flags[0], flags[1:])


def test_keyword_of_a_program_is_refused(demo, tiny):
    with refuses("no keyword 'max_token'; did you mean max_tokens?"):
        next(stream_generate(demo.model, demo.tokenizer, "Once", max_token=5))
    with refuses("no setting 'num_prompt'; did you mean num_prompts?"):
        calibrate(num_prompt=3)
    for keywords, said in (
        ({"format": "plane"}, "format 'plane' does not exist; did you mean planes?"),
        ({"residency": "dsk"}, "residency is dsk; did you mean disk?"),
        ({"manage": "atention"}, "manage is atention; did you mean attention?"),
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
