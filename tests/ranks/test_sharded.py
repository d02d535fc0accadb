"""Models divided among ranks: real processes on loopback write the texts of one process, in every mode and gear."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from architectures import CONFIGS
from conftest import PATHS, save_model, tiny_model
from ranks import run_ranks

from gearbx_mlx import Gearbox, Lossless, Route, Static, convert, load, stream_generate
from gearbx_mlx.generate.run import flag_facts, mode_facts, model_facts
from gearbx_mlx.ranks.agreement import agreement_of, difference

pytestmark = pytest.mark.processes

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
from test_sharded import facts
print(json.dumps(facts({model!r}, mx.distributed.init(backend="ring", strict=True), {sums!r}, {keywords!r})))
"""


def facts(model, group=None, sums="gather", keywords=None):
    """What a process reports about a model, or a rank about its part."""
    found, tokenizer = load(model, group=group, shard_sums=sums)
    gearbox = Gearbox(found, **(keywords or {}))
    texts, numbers = {}, []
    for name, mode in MODES.items():
        texts[name] = [r.token for r in stream_generate(found, tokenizer, PROMPT, 10, mode=mode(), gearbox=gearbox)]
        # mlx-lm still computes a token behind the text, which must not disturb what the ranks agree on next.
        numbers.append(agreement_of(found).numbers([7, 1 << 40, *range(20)]))
    bytes_read = {gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder}
    shared = {gear.name: gearbox.undivided_bytes_per_token(gear) for gear in gearbox.ladder}
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


def test_four_ranks_write_the_texts_of_one_process(wide, tmp_path):
    """In format exact; two ranks do in planes."""
    keywords = {"format": "exact", "ladder": "4,16"}
    one, four = facts(wide, keywords=keywords), on_ranks(4, tmp_path, wide, keywords=keywords)
    assert [rank["texts"] for rank in four] == [one["texts"]] * 4
    assert [rank["numbers"] for rank in four] == [one["numbers"]] * 4


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
    two = on_ranks(2, tmp_path, wide, "sum", {"group_size": 32})
    assert two[0]["texts"] == two[1]["texts"]
    assert any("this rank has columns 0-63 of 128" in line for line in two[0]["said"])


def test_a_file_that_a_flag_names_counts_by_its_content(tmp_path):
    names = [tmp_path / name for name in ("one.json", "two.json", "other.json")]
    for name, content in zip(names, ("{}", "{}", "[]")):
        name.write_text(content)
    one, two, other = [flag_facts({"manifest": str(name), "model": str(name), "prompt": "x" * 5000}) for name in names]
    assert difference([one, two]) is None
    assert difference([one, two, other]).startswith("rank 2 differs from rank 0: --manifest is a file with the digest ")
    assert difference([one, flag_facts({"manifest": "none.json", "prompt": "x" * 5000})]) is not None
    one, two, other = [mode_facts(Lossless(draft_length=length)) for length in (3, 3, 4)]
    assert difference([one, two]) is None
    assert difference([one, two, other]).startswith("rank 2 differs from rank 0: draft_length of mode lossless is 4")
    assert difference([one, mode_facts(Static())]).startswith("rank 1 differs from rank 0: the mode is static, and")


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
    assert difference([first, first]) is None
    assert difference([first, other]).startswith(f"rank 1 differs from rank 0: {named} is ")
