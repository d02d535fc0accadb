"""What every command refuses: a line, and what its one line of error says."""

import shlex
from importlib import import_module

import pytest
from conftest import HELD_OUT
from refusals import assert_refused

from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.loading import DEMO_MODEL

NAMES = {"DEMO": str(DEMO_MODEL), "DATA": str(HELD_OUT), "LONG": "x" * 5000, "WIDE": "w" * 300, "NEAR": "n" * 250}

REFUSED = [
    # what is written and read
    ("generate --max-tokens=0", "--max-tokens: out of range, got 0"),
    ("generate --max-tokens=-2", "--max-tokens: out of range, got -2"),
    ("generate --prompt ''", "--prompt: empty; pass some text"),
    ("generate --prompt '  '", "--prompt: empty; pass some text"),
    (r"generate --prompt '\n'", "--prompt: empty; pass some text"),
    ("generate --prompt \udcff", "not UTF-8"),
    ("generate --prompt-cache-file none.safetensors", "none.safetensors"),
    ("generate --chat-template-config {", "not JSON"),
    ("generate --chat-template-config []", "it is [], not an object"),
    ("generate --chat-template-config '{\"tokenize\": true}'", "chat template: refuses the messages"),
    ("generate --ignore-chat-template --prefill-response It", "--prefill-response: goes into the chat template"),
    ("generate --ignore-chat-template --system-prompt Hi", "--system-prompt: goes into the chat template"),
    ("generate --extra-eos-token nosuchtoken", '--extra-eos-token: not in the vocabulary, got "nosuchtoken"'),
    ("generate --extra-eos-token '\n'", '--extra-eos-token: not in the vocabulary, got "\\n"'),
    ("generate --extra-eos-token 4096", '--extra-eos-token: not in the vocabulary, got "4096"'),
    ("generate --extra-eos-token=-1", '--extra-eos-token: not in the vocabulary, got "-1"'),
    ("generate --seed=-1", "--seed: out of range, got -1"),
    ("generate --temp=-1", "--temp: out of range, got -1.0; use 0 to 1000"),
    ("generate --temp 1e300", "--temp: out of range, got 1e+300; use 0 to 1000"),
    ("generate --temp 1e-300", "--temp: must be 0 or 0.001 to 1000, got 1e-300; use 0 for greedy decoding"),
    ("generate --temp nan", "--temp: out of range, got nan"),
    ("generate --temp=--", "--temp: no value, got --; pass a value"),
    ("generate --top-p 1.5", "--top-p: out of range, got 1.5; use 0 to 1"),
    ("generate --min-p 2", "--min-p: out of range, got 2.0; use 0 to 1"),
    ("generate --top-k 4096", "--top-k: too many for a vocabulary of 4096, got 4096; use at most 4095"),
    (
        "generate --min-p 0.1 --min-tokens-to-keep 4097",
        "--min-tokens-to-keep: too many for a vocabulary of 4096, got 4097",
    ),
    ("generate --xtc-probability 2", "--xtc-probability: out of range, got 2.0"),
    ("generate --max-kv-size 0", "--max-kv-size: out of range, got 0; use 5 or more"),
    ("generate --prefill-step-size 0", "--prefill-step-size: out of range, got 0"),
    ("generate --kv-bits 7", "--kv-bits: unsupported, got 7; choose from"),
    ("generate --kv-group-size 5", "--kv-group-size: unsupported, got 5; choose from"),
    ("generate --kv-bits 4 --kv-group-size 128", "--kv-group-size: must divide the heads' 64 numbers, got 128"),
    ("generate --trace same.json --summary same.json", "same.json: named by --trace and --summary; use two files"),
    ("generate --max-tokens some", "--max-tokens: not a whole number, got some; … --help shows the flags"),
    ("generate --temp", "--temp: expected one argument"),
    ("benchmark", "required: {decode,mac}"),
    ("generate --json", "--json: not a flag; did you mean --summary FILE.json?"),
    ("generate 'Tell me a joke'", "use --prompt 'Tell me a joke', or … MODEL PROMPT"),
    ("generate --base DATA 'Tell me a joke'", "use --prompt 'Tell me a joke'"),
    ("generate --model DEMO DEMO hello", "belongs to no flag"),
    ("convert DEMO", "belongs to no flag"),
    ("generate --verbose maybe", "--verbose: unknown, got maybe; choose from True, False, all"),
    ("generate --model none.gguf", "none.gguf: no such file"),
    ("generate --model folder/none.gguf", "folder/none.gguf: no such file"),
    ("analyze --prompts p.txt --num-prompts 0", "--num-prompts: out of range, got 0"),
    ("analyze --kernels fast", "--kernels: unknown, got fast; choose from auto, native, mlx"),
    ("analyze --tokens 5", "--data, --tokens: are for --reference, got none"),
    ("analyze --server http://127.0.0.1:9/v1 --reference demo", "--reference: is for a local model, got --server"),
    ("analyze --server http://127.0.0.1:9/v1 --kernels mlx", "--kernels: is for a local model, got --server"),
    # gears, thresholds, modes
    *((f"{name} --gears 16,8,4", "ascend") for name in ("generate", "calibrate", "benchmark decode")),
    *((f"{name} --gears 4,7", "not supported") for name in ("generate", "calibrate")),
    ("generate --gears a", "whole numbers"),
    ("generate --format groupwise --gears 4,8,16", "format 'groupwise' has no 8-bit gear; choose from 4, 16"),
    ("generate --format rowwise --gears 3,16", "'rowwise' has no 3-bit gear; choose from 2, 4, 6, 8, 16"),
    ("generate --thresholds 3,1", "ascend … got 3, 1; use ascending numbers"),
    ("generate --thresholds 1,1", "ascend"),
    ("generate --thresholds nan,1", "finite"),
    ("generate --thresholds 1,inf", "finite"),
    ("generate --thresholds 1", "need 2 thresholds"),
    ("generate --thresholds nowhere.json", "nowhere.json"),
    ("generate --thresholds auto --mode kickdown", "auto"),
    ("generate --thresholds auto --small-model x", "auto"),
    ("evaluate --thresholds auto --data DATA --out unmade", "auto"),
    ("generate --thresholds 1,2 --mode static", "--thresholds: only for --mode route or kickdown or telemetry-only"),
    ("generate --thresholds 1,2 --num-draft-tokens 2", "--num-draft-tokens: only for --mode lossless"),
    ("generate --mode static --gear reverse", "no gear 'reverse' in the ladder 4,8,16"),
    ("generate --mode route --gear reverse", "no gear 'reverse'"),
    (
        "generate --mode kickdown --gear low",
        "--gear: only for --mode route or static or telemetry-only, got --mode kickdown; omit it",
    ),
    ("generate --residency nowhere", "--residency: unknown, got nowhere; choose from resident, disk, stream"),
    ("generate --residency stream:3GB", "--residency stream:3GB: a limit needs idle gears on disk; use disk:3GB"),
    ("generate --residency disk:much", "--residency disk:much: not a size, got 'much'; use bytes such as 3GB"),
    ("generate --base DATA --manifest DATA", "--base: chooses codes, as --manifest does; omit one of them"),
    ("generate --kernels auto:int4", "--kernels auto:int4: activations: unknown, got int4; did you mean int8?"),
    ("generate --mode kickdown --draft-model DEMO", "takes no draft model"),
    ("chat --mode kickdown --draft-model DEMO", "takes no draft model"),
    ("chat --mode lossless --num-draft-tokens 16", "--num-draft-tokens: out of range, got 16; use 1 to 15"),
    ("generate --gears 4,8 --mode static --gear 4 --prompt-gear 5", "5"),
    ("generate --gears 4,8 --prompt-gear 8", "--prompt-gear"),
    ("generate --gears 4,8 --prompt-gear 8 --mode lossless", "--prompt-gear"),
    ("generate --target-tps 1e-300", "--target-tps: out of range, got 1e-300; use 0.001 or more, or 0"),
    ("generate --target-tps nan", "--target-tps: out of range, got nan"),
    ("generate --target-tps 5 --mode lossless", "--mode lossless: generates the top gear's output"),
    (
        "generate --residency disk:2MB",
        "--residency disk:2 MB: too small for the largest gear of demo, got about 11 MB; ",
    ),
    ("generate --target-tps 5 --mode telemetry-only", "--mode telemetry-only: changes no gear"),
    # two models
    ("generate --mode pair", "--mode pair: needs a second model; pass --small-model"),
    (
        "generate --mode route --small-model S",
        "--small-model: only for --mode pair, got --mode route; omit it, or use --mode pair",
    ),
    ("generate --small-model S --gears 4,8", "--gears: only for a single model"),
    ("generate --small-model S --format exact", "--format: only for a single model"),
    ("chat --small-model S --residency disk:1MB", "--residency: only for a single model"),
    ("server --small-model S --kernels mlx", "--kernels: only for a single model"),
    ("generate --small-model S --draft-model D", "--draft-model: only for a single model"),
    ("generate --small-model S --thresholds 1,2", "--small-model needs one threshold, got 1,2"),
    (
        "generate --small-model S --thresholds=-1",
        "threshold of a pair: must be 0 bits (large model only) to inf (small only), got -1",
    ),
    ("generate --small-model S --thresholds t.json", "t.json"),
    ("generate --small-model S --gear low", "gear of a pair: unknown, got low; choose from auto, small, large"),
    ("generate --small-model nowhere", "nowhere … no such model directory"),
    # names
    *((f"generate --{flag} ' '", f"--{flag}: empty") for flag in ("model", "adapter-path", "draft-model", "gear")),
    *((f"generate --{flag} ' '", f"--{flag}: empty") for flag in ("small-model", "trace", "summary", "thresholds")),
    *((f"sensitivity --{flag} ''", f"--{flag}: empty") for flag in ("out", "model", "data")),
    *((f"benchmark decode --{flag} ''", f"--{flag}: empty") for flag in ("model", "json")),
    ("evaluate --data DATA --out ''", "--out: empty"),
    ("generate --model foo/bar--baz", "foo/bar--baz"),
    *((f"{name} --model WIDE", "no such model directory") for name in ("generate", "sensitivity", "benchmark decode")),
    ("generate --summary WIDE", "cannot be written"),
    ("sensitivity --out WIDE", "cannot be written (File name too long)"),
    ("sensitivity --out NEAR", "cannot be written (File name too long)"),
    ("sensitivity --data WIDE", "cannot be read as text"),
    ("benchmark decode --json WIDE", "cannot be written (File name too long)"),
    ("benchmark decode --json /nowhere/d.json", "there is no directory"),
    *((f"generate --{flag} LONG", "LONG") for flag in ("thresholds", "manifest", "summary", "trace", "model")),
    *((f"generate --{flag} LONG", "LONG") for flag in ("prompt-cache-file", "small-model", "base")),
    ("generate --adapter-path LONG", "LONG"),
    ("analyze --prompts LONG", "LONG"),
    ("analyze --prompts DATA --out LONG", "LONG"),
    ("analyze --prompts DATA --out /dev/null/out", "/dev/null/out: cannot be made (Not a directory)"),
    ("evaluate --data DATA --out /dev/null/out", "/dev/null/out: cannot be made (Not a directory)"),
    *((f"calibrate --{flag} LONG", "LONG") for flag in ("out", "prompts")),
    *((f"convert --{flag} LONG", "LONG") for flag in ("mlx-path", "model", "manifest")),
    *((f"sensitivity --{flag} LONG", "LONG") for flag in ("out", "data")),
    ("evaluate --data LONG", "LONG"),
    ("evaluate --data DATA --out LONG --tokens 4 --context 4", "LONG"),
    ("allocate --manifest LONG", "LONG"),
    ("benchmark decode --json LONG", "LONG"),
    # other commands
    ("sensitivity --bits 4,16", "16 is full precision"),
    ("sensitivity --bits 4,3", "gears must ascend"),
    ("sensitivity --num-samples 0", "--num-samples: out of range, got 0"),
    ("sensitivity --sequence-length 4096", "use 512 or less"),
    ("sensitivity --data nowhere.txt", "nowhere.txt"),
    ("sensitivity --format exact", "--format exact: … --format planes or affine"),
    ("evaluate --data DATA --out unmade --gears 16", "--gears: must have two gears to compare, got 16"),
    ("evaluate --data DATA --out unmade --context 1000000", "--context … 1000000"),
    ("evaluate --data DATA --out unmade --context 1", "--context: out of range, got 1; use 2 or more"),
    ("evaluate --data DATA --out unmade --tokens 0", "--tokens: out of range, got 0; use 1 or more"),
    ("evaluate --data DATA --out unmade --thresholds 1", "thresholds"),
    ("evaluate --data DATA --out unmade --kv-gears 8,4", "--kv-gears: must ascend … got 8,4"),
    ("evaluate --data DATA --out unmade --kv-gears 2,16", "--kv-gears: must ascend, of 4, 8 and 16, got 2,16"),
    ("evaluate --data DATA --out unmade --kv-gears 16", "--kv-gears: needs a gear below 16, got 16"),
    ("benchmark decode --shape wide", "not WIDTHxLAYERS"),
    ("benchmark decode --shape 100x2", "multiple of 256"),
    ("benchmark decode --context=-1", "--context: out of range, got -1; use 0 or more"),
    (f"benchmark decode --trials {10**30}", "use 1 to 100000"),
    ("benchmark decode --shape 65536x100000", "--shape 65536x100000: too large for"),
    (f"benchmark decode --model DEMO --gears 4,16 --context {10**15}", "of available memory, got at least"),
    ("benchmark mac --tokens 1", "--tokens: out of range, got 1"),
    ("benchmark mac --minutes=-1", "--minutes: out of range, got -1"),
    ("benchmark mac --json /nowhere/x", "/nowhere"),
    ("convert --restore x --gears 4", "--restore"),
    ("convert --restore x --verify x", "--restore"),
    (
        "convert --mlx-path unmade --format codebook:sigma=0.5",
        "--format: sigma of codebooks: out of range, got 0.5; use 1 to 100",
    ),
    (
        "convert --mlx-path unmade --format codebook:cap=0.9",
        "--format: cap of codebooks: out of range, got 0.9; use 0 to 0.5",
    ),
    ("convert --mlx-path unmade --format codebook:rounds=two", "rounds of codebooks: must be a number, got 'two'"),
    ("convert --mlx-path unmade --format codebook:sigma=nan", "got nan; use 1 to 100"),
    ("convert --mlx-path unmade --format codebook:depth=3", "no option 'depth=3'"),
    (
        "convert --mlx-path unmade --format codebook:rounds=0",
        "--format: rounds of codebooks: out of range, got 0; use 1 to 1000",
    ),
    (
        "convert --mlx-path unmade --format codebook-library:library=300",
        "library of codebooks: out of range, got 300; use 1 to 256",
    ),
    (
        "convert --mlx-path unmade --format codebook-library:group=48",
        "unsupported, got 48; choose from 32, 64, 128, 256",
    ),
    ("convert --mlx-path unmade --format codebook:library=16", "library belongs to codebook-library"),
    (
        "convert --mlx-path unmade --format planes:rounds=9",
        "only codebooks have choices, got planes:rounds=9; use --format planes",
    ),
    ("convert --mlx-path unmade --format nested", "--format: unknown, got nested; choose from planes, affine"),
    ("server --server http://127.0.0.1:1", "--server: needs at least two models"),
    ("server --remember", "--remember: keeps all requests for later ones; add --share-lookup"),
    ("server --server-model a,b", "--server-model: only for a server; pass --server"),
    *(
        (f"server --server http://127.0.0.1:1 --server-model a,b {flags}", words)
        for flags, words in (
            ("--model x", "--model is for local models; omit it with --server"),
            ("--gears 4,8", "--gears is for local models"),
            ("--allow-models", "--allow-models is for local models"),
            ("--vocab-size 1", "--vocab-size: out of range, got 1"),
            ("--port 70000", "--port: out of range, got 70000"),
            ("--allowed-origins https://example.org/page", "not an origin"),
        )
    ),
    *(
        (f"analyze --prompts DATA --out unmade --server http://127.0.0.1:9/v1 {flags}", words)
        for flags, words in (
            ("--model x", "--model: is for a local model, got --server"),
            ("--dtype float32", "--dtype: is for a local model, got --server"),
            ("--max-tokens=-1", "--max-tokens: must be 1 or more with --server"),
            ("--ignore-chat-template --system-prompt x", "--system-prompt: goes into the chat template"),
            ("--server-timeout nan", "--server-timeout: out of range, got nan"),
            ("--vocab-size 1", "--vocab-size: out of range, got 1"),
            ("--thresholds 1,2,3", "3 gears need 2 thresholds"),
            ("--gears 5,4", "gears must ascend"),
        )
    ),
    ("server --server x --server-model a,b", "--server: not the http or https URL of an API, got 'x'"),
    ("server --gears 4,8,16 --prompt-gear 5", "5"),
    ("server --gears 4,8,16 --mode lossless --prompt-gear turbo", "turbo"),
    ("server --mode telemetry-only --prompt-gear 8", "--prompt-gear"),
    ("server --small-model DEMO --prompt-gear 8", "--prompt-gear"),
    ("server --server http://127.0.0.1:1 --server-model a,b --keep-alive 0", "--keep-alive is for local models"),
    ("convert --prompts none", "--prompts: is for a budget; add --memory-budget or --target-bpw"),
    ("server --keep-alive soon", "--keep-alive: not a time, got 'soon'; use seconds, 5m or 1h"),
    ("server --prompt-cache-bytes much", "--prompt-cache-bytes: not a size, got 'much'"),
]


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"benchmark", "list", "lm_eval"}))
def test_invalid_value_of_each_flag_is_refused(name, capsys):
    parser = import_module(f"gearbx_mlx.{name}").setup_arg_parser()
    wrong = [action.option_strings[-1] for action in parser._actions if action.type or action.choices]
    assert wrong
    for flag in wrong:
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([flag, "?"])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert flag in lines[0]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[ascii(line) for line, _ in REFUSED])
def test_a_line_is_refused_in_one(line, words, command, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEARBX_BASES", str(tmp_path_factory.mktemp("bases")))  # no base of another test
    result = command(*(NAMES.get(word, word) for word in shlex.split(line)))
    assert_refused(result, *words.replace("LONG", "x" * 100).split(" … "))
    assert not list(tmp_path.iterdir())
