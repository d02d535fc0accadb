"""--kernels dequant-cache: a gear's weights are unpacked once, kept while it is engaged, and multiplied by MLX."""

import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import Gearbox, load
from gearbx_mlx.formats import with_cache

PROMPT = ("--ignore-chat-template", "--prompt", "Tom has 5 apples and", "-m", "12")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["rowwise", "groupwise", "codebook", "codebook-library:sigma=2.5"])
def test_the_text_is_that_without_the_cache(command, tmp_path, format):
    save_model(tiny_model(vocab_size=4096), tmp_path / "model")  # codebooks take long to make
    flags = ["--model", tmp_path / "model", "--format", format, "--gears", "4,16"]
    kept = command("generate", *PROMPT, *flags, "--kernels", "dequant-cache")
    assert kept.status == 0, kept.err
    assert kept.out == command("generate", *PROMPT, *flags, "--kernels", "mlx").out


def test_what_is_unpacked_is_kept_for_the_gear_alone(fresh_demo):
    gearbox = Gearbox(fresh_demo.model, "4,8,16", format=with_cache("rowwise"), kernels="mlx")
    gearbox.shift("low")
    layer = fresh_demo.model.model.layers[0].self_attn.q_proj
    weight = layer.dense_weight()
    assert layer.dense_weight() is weight
    gearbox.shift("mid")
    gearbox.shift("low")
    assert fresh_demo.model.model.layers[0].self_attn.q_proj.dense_weight() is not weight


def test_bytes_are_those_of_the_weights_that_are_multiplied(fresh_demo):
    gearbox = Gearbox(fresh_demo.model, "4,16", format=with_cache("rowwise"), kernels="mlx")
    low, high = gearbox.ladder
    bytes_read = gearbox.weight_bytes_per_token
    assert bytes_read(low) == pytest.approx(bytes_read(high), rel=1e-4)  # except for a row of the embedding
    packed = Gearbox(load()[0], "4,16", format="rowwise", kernels="mlx")
    assert packed.weight_bytes_per_token(low) < packed.weight_bytes_per_token(high) / 3
    assert packed.weight_bytes_per_token(high) == gearbox.weight_bytes_per_token(high)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--kernels dequant-cache: format planes is multiplied packed; give --format rowwise"),
        (("--format", "affine"), "--kernels dequant-cache: format affine is multiplied packed; give --format rowwise"),
    ],
)
def test_where_there_is_nothing_to_keep_it_is_refused_in_a_line(command, flags, message):
    done = command("generate", *PROMPT, *flags, "--kernels", "dequant-cache")
    assert (done.status, done.err) == (2, f"error: {message}\n")


def test_a_geared_checkpoint_is_refused(command, tmp_path):
    out = tmp_path / "geared"
    assert (
        command("convert", "--format", "rowwise", "--gears", "4,16", "--manage", "attention", "--mlx-path", out).status
        == 0
    )
    done = command("generate", "--model", out, *PROMPT, "--kernels", "dequant-cache")
    assert done.status == 2
    assert done.err.startswith(f"error: --kernels dequant-cache: {out} has its gears packed")
