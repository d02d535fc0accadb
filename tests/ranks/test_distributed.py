"""Texts of ranks, of one model or of parts of it: what one process writes, in every mode; and how a run dies."""

import json
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from architectures import CONFIGS
from conftest import PATHS, save_model, tiny_model
from mlx_lm.sample_utils import make_sampler
from ranks import Ranks, run_ranks

from gearbx_mlx import Gearbox, Lossless, Route, Static, convert, load, stream_generate
from gearbx_mlx.gears.gearbox import undivided_bytes_per_token
from gearbx_mlx.generate.run import flag_facts, mode_facts, model_facts
from gearbx_mlx.ranks.agreement import agreement_of, first_difference

pytestmark = pytest.mark.processes

GENERATE = ["-m", "gearbx_mlx.generate", "--gears", "4,8,16", "-m", "24"]
TOKENS = ["--ignore-chat-template", "--prompt", "one two three"]

PROMPT = "Tom has 3 apples"
MODES = {
    "static": lambda: Static(),
    "low": lambda: Static(gear="low"),
    "route": lambda: Route(),
    "route that shifts soon": lambda: Route(min_gear_duration=1),
    "kickdown": lambda: "kickdown",
    "lossless": lambda: Lossless(draft_length=3),
}
SCRIPT = """
import json, sys
sys.path[:0] = {paths}
import chosen_device
import mlx.core as mx
from test_distributed import facts
print(json.dumps(facts({model!r}, mx.distributed.init(backend="ring", strict=True), **{how!r})))
"""


def give_other_logits(model):
    class Other(type(model)):
        def __call__(self, *args, **kwargs):
            return 3 * super().__call__(*args, **kwargs)[..., ::-1]

    model.__class__ = Other


def facts(model, group=None, sums="gather", pipeline=False, other_logits=False, **gears):
    """What a process reports about a model, or a rank about its part.

    Args:
        other_logits: those of rank 1 differ, and so do its entropies and tokens. gears: arguments of the gearbox.
    """
    found, tokenizer = load(model, group=group, shard_sums=sums, pipeline=pipeline)
    gearbox = Gearbox(found, **gears)
    if other_logits and group.rank() == 1:
        give_other_logits(found)
    texts, gears_of, hashes, numbers = {}, {}, {}, []
    for name, mode in MODES.items():
        mx.random.seed(5)
        how = {"mode": mode(), "gearbox": gearbox, "sampler": make_sampler(0.8)}
        run = list(stream_generate(found, tokenizer, PROMPT, 10, **how))
        texts[name], gears_of[name] = [r.token for r in run], [r.gear for r in run]
        hashes[name] = [sha256(memoryview(r.logprobs.astype(mx.float32))).hexdigest() for r in run]
        # mlx-lm still computes a token behind the text, which must not disturb what the ranks agree on next.
        numbers.append(agreement_of(found).numbers([7, 1 << 40, *range(20)]))
    bytes_read = {gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder}
    shared = {gear.name: undivided_bytes_per_token(gearbox, gear) for gear in gearbox.ladder}
    said = gearbox.describe().splitlines()
    return {
        "texts": texts,
        "gears": gears_of,
        "hashes": hashes,
        "fingerprint": gearbox.fingerprint,
        "read": bytes_read,
        "shared": shared,
        "said": said,
        "numbers": numbers,
    }


def on_ranks(count, tmp_path, model, **how):
    """The reports of every rank; further arguments are those of `facts`."""
    script = tmp_path / "script.py"
    paths = [str(Path(__file__).parent), *PATHS]
    script.write_text(SCRIPT.format(paths=paths, model=str(model), how=how))
    ended = run_ranks(count, [str(script)])
    assert [rank.status for rank in ended] == [0] * count, ended[0].stderr
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ended]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of a class that can be divided in both ways, for up to four ranks."""
    path = tmp_path_factory.mktemp("ranks") / "model"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 512}
    save_model(tiny_model("qwen2", vocab_size=4096, num_hidden_layers=2, max_position_embeddings=32768, **heads), path)
    return path


BY_MLX = {"ladder": "4,8,16", "kernels": "mlx"}


@pytest.fixture(scope="module")
def alone(model):
    return facts(model, **BY_MLX)


def assert_same(ranks, alone):
    """All ranks have the tokens and gears of one process, whose drafts alone may be others."""
    for rank in ranks:
        assert rank["texts"] == alone["texts"]
        assert rank["gears"] == alone["gears"] | {"lossless": ranks[0]["gears"]["lossless"]}


class TestTexts:
    @pytest.mark.parametrize(("ranks", "pipeline"), [(2, False), (4, False), (2, True)])
    def test_every_mode_writes_what_one_process_writes_with_equal_bits(self, model, alone, tmp_path, ranks, pipeline):
        found = on_ranks(ranks, tmp_path, model, pipeline=pipeline, **BY_MLX)
        assert_same(found, alone)
        assert [rank["hashes"] for rank in found] == [alone["hashes"]] * ranks

    def test_other_logits_on_a_rank_change_neither_tokens_nor_gears(self, model, alone, tmp_path):
        first, second = found = on_ranks(2, tmp_path, model, other_logits=True, **BY_MLX)
        assert_same(found, alone)
        assert first["hashes"] == alone["hashes"]
        assert all(second["hashes"][mode] != alone["hashes"][mode] for mode in MODES)


class TestCommand:
    def test_rank_0_alone_writes_text_trace_and_summary(self, tmp_path):
        files = "--trace", str(tmp_path / "trace.jsonl"), "--summary", str(tmp_path / "summary.json")
        alone = subprocess.run([sys.executable, *GENERATE], capture_output=True, text=True)
        first, second = run_ranks(2, [*GENERATE, *files])
        assert [first.status, second.status] == [0, 0], (first, second)
        assert first.stdout == alone.stdout
        assert (second.stdout, second.stderr) == ("", "")
        assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 24
        assert json.loads((tmp_path / "summary.json").read_text())["tokens"] == 24
        assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "trace.jsonl"]

    def test_models_that_differ_are_refused(self, tmp_path):
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
def test_a_rank_killed_while_it_computes_ends_the_other_with_a_line(model, tmp_path, when, dies):
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


@pytest.fixture
def wide(tmp_path):
    """A model that four ranks can divide."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096}
    path = tmp_path / "wide"
    save_model(tiny_model("llama", **(CONFIGS["llama"] | heads), dtype=mx.bfloat16), path)
    return path


def test_two_ranks_write_the_texts_of_one_process_and_read_half(tmp_path):
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
def test_ranks_over_a_geared_checkpoint_write_the_texts_of_one_process(wide, tmp_path, quantized):
    geared = tmp_path / "geared"
    if quantized:
        mlx_lm.convert(str(wide), str(tmp_path / "quantized"), quantize=True, q_bits=8)
        convert(tmp_path / "quantized", geared)
    else:
        convert(wide, geared, gears="4,16", format="exact")
    one, two = facts(geared), on_ranks(2, tmp_path, geared)
    assert [rank["texts"] for rank in two] == [one["texts"]] * 2


def test_sums_over_ranks_agree_on_all_ranks(wide, tmp_path):
    two = on_ranks(2, tmp_path, wide, sums="sum", group_size=32)
    assert two[0]["texts"] == two[1]["texts"]
    assert any("this rank has columns 0-63 of 128" in line for line in two[0]["said"])


def test_a_file_that_a_flag_names_counts_by_its_content(tmp_path):
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


def test_a_prompt_is_text_where_a_file_has_its_name_too(tmp_path, monkeypatch):
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
def test_gears_that_are_not_the_same_are_named(wide, keywords, named):
    first, other = (model_facts(Gearbox(load(str(wide))[0], **given)) for given in ({}, keywords))
    assert first_difference([first, first]) is None
    assert first_difference([first, other]).startswith(f"rank 1 differs from rank 0: {named} is ")
