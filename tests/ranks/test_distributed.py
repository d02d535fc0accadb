"""Texts of ranks, of one model or of parts of it: what one process writes, in every mode; and how a run dies."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from architectures import CONFIGS
from conftest import PATHS, save_model, tiny_model
from ranks import Ranks, run_ranks

from gearbx_mlx import Gearbox, Lossless, Route, Static, convert, load, stream_generate
from gearbx_mlx.gears.gearbox import undivided_bytes_per_token
from gearbx_mlx.generate.run import flag_facts, mode_facts, model_facts
from gearbx_mlx.ranks.agreement import agreement_of, first_difference

pytestmark = pytest.mark.processes

GENERATE = ["-m", "gearbx_mlx.generate", "--gears", "4,8,16", "-m", "24"]
TOKENS = ["--ignore-chat-template", "--prompt", "one two three"]

# Texts of every mode in one run of ranks. On rank 1 something differs: argv[1] says what.
TEXTS = """
import hashlib, json, signal, sys
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from gearbx_mlx import Gearbox, Kickdown, Lossless, Route, Static, load, stream_generate
from gearbx_mlx.ranks.place import begin
from gearbx_mlx.ranks.place import place_here

differs, path = sys.argv[1], sys.argv[2]
mx.set_default_device(mx.cpu)
place = place_here()
group = None
if place is not None:
    begin(place)
    group = mx.distributed.init()
on_rank_1 = place is not None and place.rank == 1
model, tokenizer = load(path, group=group, pipeline="pipeline" in sys.argv)
gearbox = Gearbox(model, "4,8,16", kernels="mlx")

if differs == "logits" and on_rank_1:  # so its entropies and tokens are others than rank 0's
    kind = type(model)
    class Other(kind):
        def __call__(self, *args, **kwargs):
            logits = super().__call__(*args, **kwargs)
            return logits[..., ::-1] * 3
    model.__class__ = Other

def sampler():
    sample = make_sampler(0.8)
    def other(logprobs):
        return (sample(logprobs) + 7) % logprobs.shape[-1]
    return other if differs == "token" and on_rank_1 else sample

found = {}
modes = [Route(), Route(thresholds=(2.0, 4.0), min_gear_duration=1), Kickdown(), Lossless(), Static(gear=4)]
for place, mode in enumerate(modes):
    mx.random.seed(5)
    tokens, gears, hashes = [], [], []
    for response in stream_generate(model, tokenizer, "one two three", 4, mode=mode, sampler=sampler()):
        tokens.append(response.token)
        gears.append(response.gear)
        hashes.append(hashlib.sha256(memoryview(response.logprobs.astype(mx.float32))).hexdigest())
    found[f"{place} {mode.name}"] = [tokens, gears, hashes]
print(json.dumps(found))
print("complete", flush=True)
if group is not None:
    signal.pause()  # a rank that leaves breaks the ring under those that still compute
"""


def texts(ranks, differs, model, *further):
    """The results of each rank, by rank; ranks 1: one process alone."""
    command = ["-c", TEXTS, differs, str(model), *further]
    if ranks == 1:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        return [json.loads(done.stdout.splitlines()[0])]
    with Ranks(ranks, command) as running:
        for rank in range(ranks):
            running.until(rank, "complete\n")
        return [json.loads(running.output(rank)[0].splitlines()[0]) for rank in range(ranks)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of a class that can be divided in both ways, for up to four ranks."""
    path = tmp_path_factory.mktemp("ranks") / "model"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 512}
    save_model(tiny_model("qwen2", vocab_size=4096, num_hidden_layers=2, max_position_embeddings=32768, **heads), path)
    return path


@pytest.fixture(scope="module")
def alone(model):
    return texts(1, "nothing", model)[0]


class TestOutputs:
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_every_mode_equals_single_process_on_all_ranks(self, model, alone, ranks):
        for found in texts(ranks, "nothing", model):
            assert found == alone

    def test_pipeline_equals_single_process(self, model, alone):
        for found in texts(2, "nothing", model, "pipeline"):
            assert found == alone

    def test_deviating_rank_logits_change_no_tokens_or_gears(self, model, alone):
        first, second = texts(2, "logits", model)
        assert first == alone
        for mode, (tokens, gears, hashes) in second.items():
            assert [tokens, gears] == alone[mode][:2], mode
            assert hashes != alone[mode][2], mode


class TestCommand:
    def test_only_rank_0_writes_output_trace_and_summary(self, tmp_path):
        files = "--trace", str(tmp_path / "trace.jsonl"), "--summary", str(tmp_path / "summary.json")
        alone = subprocess.run([sys.executable, *GENERATE], capture_output=True, text=True)
        first, second = run_ranks(2, [*GENERATE, *files])
        assert [first.status, second.status] == [0, 0], (first, second)
        assert first.stdout == alone.stdout
        assert (second.stdout, second.stderr) == ("", "")
        assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 24
        assert json.loads((tmp_path / "summary.json").read_text())["tokens"] == 24
        assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "trace.jsonl"]

    def test_different_models_are_refused(self, tmp_path):
        for seed in (0, 1):
            save_model(tiny_model("qwen2", seed, vocab_size=4096, num_key_value_heads=2), tmp_path / str(seed))
        each = {rank: ["--model", str(tmp_path / str(rank))] for rank in (0, 1)}
        ended = run_ranks(2, [*GENERATE, *TOKENS], each=each)
        assert [rank.status for rank in ended] == [2, 2]
        assert ended[0].stderr.count("\n") == 1
        assert ended[0].stderr.startswith("error: rank 1 differs from rank 0: the model's fingerprint is ")
        assert (ended[0].stdout, ended[1].stdout, ended[1].stderr) == ("", "", "")


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_killed_rank_ends_computing_peer_with_message(model, tmp_path, when, dies):
    """Prefill: one token per pass, for thousands of passes. Decode: thousands of tokens."""
    prompt = "one " * (5000 if when == "prefill" else 1)
    flags = ["--ignore-chat-template", "--prompt", prompt, "--prefill-step-size", "1", "--model", str(model)]
    trace = tmp_path / "trace.jsonl"
    files = ["--trace", str(trace)]
    command = ["-m", "gearbx_mlx.generate", "--gears", "16", "-m", "9000", *flags, *files, "--verbose", "all"]
    with Ranks(2, command) as ranks:
        ranks.until(0, "lm_head" if when == "prefill" else "")
        ranks.processes[dies].send_signal(signal.SIGKILL)
        killed = ranks.elapsed()
        ended = ranks.wait()
    other = ended[1 - dies]
    assert other.status == 1
    assert other.seconds - killed < 10
    line = next(line for line in other.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: rank {dies} (127.0.0.1:")
    assert "Traceback" not in other.stderr
    if dies == 1:
        assert list(tmp_path.iterdir()) == []


PROMPT = "Tom has 3 apples"
MODES = {
    "static": lambda: Static(),
    "low": lambda: Static(gear="low"),
    "route": lambda: Route(),
    "kickdown": lambda: "kickdown",
    "lossless": lambda: Lossless(draft_length=3),
}
SCRIPT = """
import json, sys
sys.path[:0] = {paths}
import chosen_device
import mlx.core as mx
from test_distributed import facts
print(json.dumps(facts({model!r}, mx.distributed.init(backend="ring", strict=True), {sums!r}, {keywords!r})))
"""


def facts(model, group=None, sums="gather", keywords=None):
    """Report what a process knows of a model, or a rank of its part."""
    found, tokenizer = load(model, group=group, shard_sums=sums)
    gearbox = Gearbox(found, **(keywords or {}))
    texts, numbers = {}, []
    for name, mode in MODES.items():
        texts[name] = [r.token for r in stream_generate(found, tokenizer, PROMPT, 10, mode=mode(), gearbox=gearbox)]
        # mlx-lm still computes a token behind the text, which must not disturb what the ranks agree on next.
        (shared,) = agreement_of(found).arrays(mx.array([7, 1 << 30, *range(20)], mx.uint32))
        numbers.append(shared.tolist())
    bytes_read = {gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder}
    shared = {gear.name: undivided_bytes_per_token(gearbox, gear) for gear in gearbox.ladder}
    said = gearbox.describe().splitlines()
    return {
        "texts": texts,
        "fingerprint": gearbox.fingerprint,
        "read": bytes_read,
        "shared": shared,
        "said": said,
        "numbers": numbers,
    }


def on_ranks(count, tmp_path, model, sums="gather", keywords=None):
    """The reports of every rank."""
    script = tmp_path / "script.py"
    paths = [str(Path(__file__).parent), *PATHS]
    script.write_text(SCRIPT.format(paths=paths, model=str(model), sums=sums, keywords=keywords))
    ended = run_ranks(count, [str(script)])
    assert [rank.status for rank in ended] == [0] * count, ended[0].stderr
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ended]


@pytest.fixture
def wide(tmp_path):
    """A model that four ranks can divide."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096}
    path = tmp_path / "wide"
    save_model(tiny_model("llama", **(CONFIGS["llama"] | heads), dtype=mx.bfloat16), path)
    return path


def test_two_ranks_equal_single_process_and_read_half(tmp_path):
    from gearbx_mlx.loading import DEMO_MODEL

    one, two = facts(DEMO_MODEL), on_ranks(2, tmp_path, DEMO_MODEL)
    assert [rank["texts"] for rank in two] == [one["texts"]] * 2
    assert [rank["fingerprint"] for rank in two] == [one["fingerprint"]] * 2
    for rank in two:
        for gear, read in rank["read"].items():
            shared = rank["shared"][gear]
            assert (read - shared) / (one["read"][gear] - shared) == pytest.approx(0.5, rel=0.03)
        what = "every rank reads the others, norms and a tied head whole"
        assert rank["said"][-1] == f"{what}: {shared} of {read} bytes a token"
    assert "this rank has rows 128-255 of 256" in "".join(two[1]["said"])


@pytest.mark.parametrize("quantized", [False, True])
def test_ranks_with_geared_checkpoint_equal_single_process(wide, tmp_path, quantized):
    geared = tmp_path / "geared"
    if quantized:
        mlx_lm.convert(str(wide), str(tmp_path / "quantized"), quantize=True, q_bits=8)
        convert(tmp_path / "quantized", geared)
    else:
        convert(wide, geared, gears="4,16", format="exact")
    one, two = facts(geared), on_ranks(2, tmp_path, geared)
    assert [rank["texts"] for rank in two] == [one["texts"]] * 2


def test_sums_over_ranks_agree_on_all_ranks(wide, tmp_path):
    two = on_ranks(2, tmp_path, wide, "sum", {"group_size": 32})
    assert two[0]["texts"] == two[1]["texts"]
    assert any("this rank has columns 0-63 of 128" in line for line in two[0]["said"])


def test_flag_files_are_compared_by_content(tmp_path):
    names = [tmp_path / name for name in ("one.json", "two.json", "other.json")]
    for name, content in zip(names, ("{}", "{}", "[]")):
        name.write_text(content)
    one, two, other = [flag_facts({"manifest": str(name), "model": str(name), "prompt": "x" * 5000}) for name in names]
    assert first_difference([one, two]) is None
    assert first_difference([one, two, other]).startswith(
        "rank 2 differs from rank 0: --manifest is a file with the digest "
    )
    assert first_difference([one, flag_facts({"manifest": "none.json", "prompt": "x" * 5000})]) is not None
    one, two, other = [mode_facts(Lossless(draft_length=length)) for length in (3, 3, 4)]
    assert first_difference([one, two]) is None
    assert first_difference([one, two, other]).startswith(
        "rank 2 differs from rank 0: draft_length of mode lossless is 4"
    )
    assert first_difference([one, mode_facts(Static())]).startswith(
        "rank 1 differs from rank 0: the mode is static, and"
    )


def test_prompt_equal_to_file_name_stays_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello").write_text("a file")
    assert flag_facts({"prompt": "hello"}) == {"--prompt": "hello"}


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"ladder": "4,16"}, "the ladder"),
        ({"group_size": 32}, "the group size"),
        ({"format": "affine"}, "the format"),
        ({"tables": {"low": {"model.layers.0.mlp.down_proj": 8}}}, "the bits of the layers"),
    ],
)
def test_different_gears_are_named(wide, keywords, named):
    first, other = (model_facts(Gearbox(load(str(wide))[0], **given)) for given in ({}, keywords))
    assert first_difference([first, first]) is None
    assert first_difference([first, other]).startswith(f"rank 1 differs from rank 0: {named} is ")
