"""What --kv-gears refuses, each in one line."""

import pytest
from conftest import save_model, tiny_model
from http_server import served

from gearbx_mlx import GearbxError, batch_generate, stream_generate
from gearbx_mlx.decoding.caches import cache_in_gears


@pytest.mark.parametrize(
    ("architecture", "keywords", "complaint"),
    [
        ("llama", {"kv_gears": "4,5"}, "--kv-gears is 4,5; give ascending bits of 4, 8 and 16"),
        ("llama", {"kv_gears": "8,4"}, "--kv-gears is 8,4; give ascending"),
        ("llama", {"kv_gears": "four"}, "--kv-gears is four; give ascending"),
        ("llama", {"kv_gears": ()}, "--kv-gears is ; give ascending"),
        ("llama", {"kv_gears": "4,16", "kv_gear": 8}, "--kv-gear is 8, and --kv-gears 4,16; choose one of them"),
        ("llama", {"kv_gear": 8}, "--kv-gear is 8, and there are no --kv-gears"),
        ("llama", {"kv_gears": "4,16", "kv_bits": 4}, "--kv-gears and --kv-bits are two ways"),
        ("llama", {"kv_gears": "4,16", "kv_gear": 4, "mode": "lossless"}, "--kv-gear does not go with mode 'lossless'"),
        ("qwen2", {"kv_gears": "4,16", "max_kv_size": 8}, "--kv-gears is 4,16, and a cache that rotates"),
        ("gemma3_text", {"kv_gears": "4,16"}, "--kv-gears is 4,16, and a cache that rotates"),
        ("mamba", {"kv_gears": "4,16"}, "--kv-gears is 4,16, and ArraysCache has no gears"),
        ("lfm2", {"kv_gears": "4,16"}, "--kv-gears is 4,16, and ArraysCache has no gears"),
    ],
)
def test_gears_that_cannot_be_are_refused_in_one_line(demo, architecture, keywords, complaint):
    model = tiny_model(architecture)
    with pytest.raises(GearbxError, match=complaint) as refused:
        stream_generate(model, demo.tokenizer, [1, 5, 9], 5, **keywords)
    assert "\n" not in str(refused.value)


def test_another_ladder_than_that_of_the_cache_is_refused(demo):
    cache = cache_in_gears(demo.model, None, "4,8")
    with pytest.raises(GearbxError, match="--kv-gears is 4,16, and the prompt cache has 4,8"):
        cache_in_gears(demo.model, None, "4,16", cache=cache)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--kv-gears", "4,5"), "--kv-gears is 4,5"),
        (("--kv-gears", "4,16", "--kv-bits", 4), "--kv-gears and --kv-bits"),
        (("--kv-gears", "4,16", "--draft-model", "x"), "--kv-gears and --draft-model"),
        (("--kv-gears", "4,16", "--small-model", "x"), "--kv-gears"),
    ],
)
def test_flags_that_do_not_go_together_end_in_one_line(command, flags, complaint):
    result = command("generate", *flags, "-m", 3)
    assert result.status == 2
    assert complaint in result.err
    assert "Traceback" not in result.err


def test_a_batch_has_no_gears_of_the_cache(demo):
    with pytest.raises(GearbxError, match="kv_gears is for one text at a time"):
        batch_generate(demo.model, demo.tokenizer, ["Once", "upon"], kv_gears="4,16")


@pytest.mark.parametrize(
    ("architecture", "flags", "complaint"),
    [
        ("mamba", {"mode": "static"}, "--kv-gears is 4,16, and ArraysCache has no gears"),
    ],
)
def test_server_refuses_before_it_answers(tmp_path, architecture, flags, complaint):
    save_model(tiny_model(architecture), tmp_path / "model")
    with (
        pytest.raises(GearbxError, match=complaint),
        served(model=str(tmp_path / "model"), kv_gears="4,16", log_level="ERROR", **flags),
    ):
        pass
