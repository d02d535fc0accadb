"""A KV cache in gears, in every mode."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, Kickdown, Lossless, Route, Static, stream_generate
from gearbx_mlx.formats.kv_cache import TOGETHER, NestedKVCache
from gearbx_mlx.kernels import cpu
from gearbx_mlx.telemetry.summary import Tally, kv_rows, kv_summary

SHORT = [1 + i % 50 for i in range(150)]


@pytest.fixture(scope="module", params=["mlx", "native"])
def gearbox(request, demo):
    """A gearbox of the demo model, on either kind of kernels; shared by all tests that ask for it."""
    if request.param == "native" and cpu.why_not() is not None:
        pytest.skip(f"no native kernels: {cpu.why_not()}")
    return Gearbox(demo.model, "4,16", kernels=request.param)


@pytest.fixture(scope="module")
def tiny():
    """A gearbox of a random model, whose vocabulary is smaller than that of the tokenizer."""
    return Gearbox(tiny_model(), "4,8,16")


def text(gearbox, tokenizer, prompt, mode, tokens=24, **keywords):
    mx.random.seed(1)
    return list(stream_generate(gearbox.model, tokenizer, prompt, tokens, gearbox=gearbox, mode=mode, **keywords))


def written(responses) -> list[tuple[int, bytes]]:
    return [(r.token, np.array(r.logprobs).tobytes()) for r in responses]


@pytest.fixture(scope="module")
def long(demo) -> list[int]:
    """A prompt of more tokens than are packed at once."""
    tokens = demo.tokenizer.encode("Once upon a time there was a king who had three daughters. " * 14)
    assert len(tokens) > 2 * TOGETHER
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("ladder", ["16", "4,16", "4,8,16", "4,8", "8"])
def test_lossless_writes_the_text_of_both_top_gears(demo, gearbox, long, ladder):
    alone = text(gearbox, demo.tokenizer, long, Static(), 12, kv_gears=ladder)
    drafted = text(gearbox, demo.tokenizer, long, Lossless(draft_length=5), 12, kv_gears=ladder)
    assert written(drafted) == written(alone)
    assert sum(r.from_draft for r in drafted) > 0


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("ladder", ["16", "4,16"])
def test_entries_as_they_are_give_the_text_without_gears(demo, gearbox, long, ladder):
    plain = text(gearbox, demo.tokenizer, long, Static(), 12)
    assert written(text(gearbox, demo.tokenizer, long, Static(), 12, kv_gears=ladder)) == written(plain)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Static(gear="low"), Kickdown(rule=lambda *_: False), Lossless(draft_length=2)])
@pytest.mark.parametrize("ladder", ["4,16", "4,8"])
def test_prompt_reads_its_entries_however_it_is_cut(demo, gearbox, long, mode, ladder):
    prompt = long[:137]

    def first_tokens(**keywords) -> np.ndarray:
        responses = text(gearbox, demo.tokenizer, prompt, mode, 3, **keywords)
        assert not responses[0].kv_bytes
        return np.array([np.array(r.logprobs) for r in responses])

    whole = first_tokens(kv_gears=ladder)
    for step in (8, 17):
        np.testing.assert_allclose(first_tokens(kv_gears=ladder, prefill_step_size=step), whole, atol=1e-3)
    np.testing.assert_allclose(whole[0], first_tokens()[0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_read_a_third_of_what_the_top_gear_reads_at_most(demo, dtype):
    model = tiny_model()
    gearbox = Gearbox(model, "4,16", dtype=dtype)
    tally = Tally.of(["low", "high"])
    prompt = [1 + i % 50 for i in range(2100)]
    for response in text(gearbox, demo.tokenizer, prompt, Lossless(draft_length=3), 8, kv_gears="4,16"):
        tally.add(response)
    summary = kv_summary(tally, len(model.layers))
    read = summary["kv_bytes_per_pass"]
    assert read["4"] <= 0.35 * read["16"]
    assert f"{read['4'] / read['16']:.2f}" in kv_rows(summary)[0][1]
    assert summary["kv_passes"]["4"] == tally.drafted


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [("4,16", {"low": 4, "mid": 4, "high": 16}), ("4,8,16", {"low": 4, "mid": 8, "high": 16})],
)
def test_gear_of_the_cache_follows_that_of_the_weights(demo, tiny, ladder, expected):
    for name, bits in expected.items():
        responses = text(tiny, demo.tokenizer, SHORT, Static(gear=name), 3, kv_gears=ladder)
        assert set().union(*(r.kv_bytes for r in responses)) == {bits}


@pytest.mark.parametrize(
    ("gears", "ladder", "expected"), [("4,16", "4,8,16", {"low": 4, "high": 16}), ("16", "4,8", {"high": 8})]
)
def test_ladders_of_unlike_length_go_together_by_their_ends(demo, gears, ladder, expected):
    gearbox = Gearbox(tiny_model(), gears)
    for name, bits in expected.items():
        responses = text(gearbox, demo.tokenizer, SHORT, Static(gear=name), 3, kv_gears=ladder)
        assert set().union(*(r.kv_bytes for r in responses)) == {bits}


@pytest.mark.parametrize("mode", [Route(), Kickdown(), Static(), "telemetry-only"])
def test_one_gear_of_the_cache_may_be_asked_for(demo, tiny, mode):
    gearbox, model = (None, tiny_model()) if mode == "telemetry-only" else (tiny, tiny.model)
    responses = stream_generate(model, demo.tokenizer, SHORT, 4, gearbox=gearbox, mode=mode, kv_gears=(4, 8), kv_gear=4)
    assert set().union(*(r.kv_bytes for r in responses)) == {4}


def test_kickdown_reads_both_caches_as_it_climbs(demo, tiny):
    responses = text(tiny, demo.tokenizer, SHORT, Kickdown(rule=lambda *_: True), 4, kv_gears="4,16")
    plain = text(tiny, demo.tokenizer, SHORT, Static(), 4)
    assert [r.token for r in responses] == [r.token for r in plain]
    assert [set(r.kv_bytes) for r in responses] == [set(), *[{4, 16}] * 3]


@pytest.mark.slow
def test_text_goes_on_from_a_cache_that_is_kept(demo, gearbox, long):
    cache = make_prompt_cache(demo.model)
    first = text(gearbox, demo.tokenizer, long, Static(), 5, kv_gears="4,8", prompt_cache=cache)
    assert {type(part) for part in cache} == {NestedKVCache}
    told = [*long, *(r.token for r in first)]
    for part in cache:
        part.trim(part.offset - len(told) + 1)
    again = text(gearbox, demo.tokenizer, told[-1:], Static(), 5, kv_gears="4,8", prompt_cache=cache)
    whole = text(gearbox, demo.tokenizer, long, Static(), 10, kv_gears="4,8")
    assert [r.token for r in [*first, *again]] == [r.token for r in whole]


def test_command_shows_what_passes_read(command, tmp_path):
    file = tmp_path / "s.json"
    tale = "Once upon a time there was a king who had three daughters. " * 14
    flags = ("--mode", "lossless", "--kv-gears", "4,16", "-m", 16, "--summary", file, "--ignore-chat-template")
    shown = command("generate", *flags, "-p", tale)
    assert shown.status == 0, shown.err
    assert "KV cache read" in shown.err
    assert "a pass" in shown.err
