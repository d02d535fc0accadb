"""Layers of other kinds than a plain linear one: which of them change gear, and what is reported of the others."""

import math
import re

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from architectures import CONFIGS, as_initialised, tiny, why_not
from architectures.reading import bytes_read
from conftest import PROMPT, save_model, tiny_model

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.decoding.governor import cap_schedule_of
from gearbx_mlx.errors import GearbxWarning
from gearbx_mlx.formats import FORMATS
from gearbx_mlx.gears.cost import chosen_experts, experts_of
from gearbx_mlx.gears.discovery import is_attention

STEP = [1, 5, 9, 2, 7, 3, 11]
LADDERS = {"groupwise": "4,16", "codebook": "4,6,16", "codebook-library": "4,16"}


def latent(**change):
    return tiny_model("deepseek_v3", first_k_dense_replace=1, **change)


def stacked(module: nn.Module, width: int, transpose: bool) -> mx.array:
    """The products of a layer of heads with unit vectors, (H, width, ...)."""
    return module(mx.eye(width)[None], transpose=transpose)


class TestHeads:
    """mlx-lm's MultiLinear: a matrix for each head, multiplied from the left or the right."""

    @pytest.mark.some(2)
    @pytest.mark.parametrize("format", [name for name in FORMATS if name != "exact"])  # of bfloat16: test_exact
    def test_multiply_by_one_matrix_from_both_sides_in_every_format(self, format):
        model = latent()
        gearbox = Gearbox(model, LADDERS.get(format, "4,8,16"), format=format, group_size=32)
        path, layer = "model.layers.0.self_attn.embed_q", model.model.layers[0].self_attn
        weight = layer.embed_q.weight
        assert path in {layer.path for layer in gearbox.layers}
        for gear in gearbox.ladder:
            gearbox.shift(gear)
            rows = stacked(layer.embed_q, weight.shape[1], transpose=False)
            columns = stacked(layer.embed_q, weight.shape[2], transpose=True)
            assert mx.allclose(rows, columns.swapaxes(-1, -2), atol=1e-6).item()
            error = (mx.linalg.norm(rows - weight) / mx.linalg.norm(weight)).item()
            assert error < 2.0**-gear.bits * 4
            assert gear.dense or error > 0

    def test_the_low_gear_is_what_mlx_lm_quantizes(self):
        model, stock = latent(), latent()
        gearbox = Gearbox(model, "4,8,16", format="affine", group_size=32, kernels="mlx")
        nn.quantize(
            stock, 32, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "embed_tok" not in path
        )
        gearbox.shift("low")
        assert mx.array_equal(model(PROMPT), stock(PROMPT)).item()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("residency", ["resident", "disk"])
    @pytest.mark.parametrize("format", ["planes", "affine", "rowwise"])
    def test_come_from_a_geared_checkpoint(self, tmp_path, format, residency):
        source, out = tmp_path / "latent", tmp_path / "geared"
        save_model(latent(vocab_size=4096), source)
        layout = {"q_group_size": 32, "format": format, "gears": "4,8,16"}
        gearbx_mlx.convert(hf_path=str(source), mlx_path=str(out), embeddings="keep", **layout)
        saved = Gearbox(gearbx_mlx.load(out)[0], residency=residency, kernels="mlx")
        made = Gearbox(gearbx_mlx.load(source)[0], "4,8,16", format=format, group_size=32, kernels="mlx")
        for gear in ("low", "high", "mid", "low"):
            saved.shift(gear)
            made.shift(gear)
            assert mx.array_equal(saved.model(PROMPT), made.model(PROMPT)).item()
            assert saved.weight_bytes_per_token(saved.gear) == made.weight_bytes_per_token(made.gear)
        stock = mlx_lm.load(str(out))[0]
        if format == "rowwise":  # which mlx-lm cannot run, so it gets the original
            made.shift("high")
        assert mx.allclose(stock(PROMPT), made.model(PROMPT), atol=1e-5).item()

    def test_all_of_them_are_counted(self):
        model = latent()
        gearbox = Gearbox(model, "4,16", format="affine", group_size=32)
        heads = [layer for layer in gearbox.layers if layer.path.endswith("embed_q")]
        weights = math.prod(heads[0].module.weight.shape)
        assert gearbox.layer_bytes(heads[0], 16) == 4 * weights
        assert gearbox.layer_bytes(heads[0], 4) == weights // 2 + 2 * 4 * weights // 32


class TestOthers:
    @pytest.mark.parametrize("architecture", ["llama4_text", "seed_oss", "minicpm"])
    def test_a_head_that_multiplies_by_the_embeddings_weight_stays_dense_and_says_so(self, architecture):
        model = tiny(architecture, tie_word_embeddings=True)
        gearbox = Gearbox(model, group_size=32, kernels="mlx")
        assert gearbox.unmanaged["model.embed_tokens"] == "class Model reads its weight itself"
        assert "embed_tokens: dense (class Model reads its weight itself)" in gearbox.describe()
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == bytes_read(model, STEP)
        gearbox.shift("low")
        assert model(PROMPT).shape[-1] == len(model.model.embed_tokens.weight)

    @pytest.mark.parametrize(
        ("architecture", "path", "reason"),
        [
            ("deepseek_v3", "model.layers.1.mlp.gate", "layers of class MoEGate are not known"),
            ("talkie", "lm_head", "a matrix that class Model multiplies by itself"),
            ("iquestloopcoder", "model.gate_projections.0", "layers of class LoopGateProjection are not known"),
            ("lfm2", "model.layers.0.conv.conv", "a convolution"),
            (
                "recurrent_gemma",
                "model.layers.0.temporal_block.rg_lru.input_gate_weight",
                "a matrix that class RGLRU multiplies by itself",
            ),
        ],
    )
    def test_matrices_that_a_class_multiplies_by_itself_are_reported(self, architecture, path, reason):
        model = tiny(architecture)
        gearbox = Gearbox(model, group_size=32)
        assert gearbox.unmanaged[path] == reason
        numbers = re.sub(r"\d+", "[0-9,-]+", re.escape(path))
        assert re.search(rf"^{numbers}: dense \({reason}\)", gearbox.describe(), re.MULTILINE)
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == bytes_read(model, STEP)

    @pytest.mark.parametrize("sharding", ["all-to-sharded", "sharded-to-all"])
    @pytest.mark.parametrize("quantized", [False, True])
    def test_sharded_layers_are_reported_and_counted(self, sharding, quantized):
        model = tiny_model()
        plain = Gearbox(tiny_model(), group_size=32)
        layer = model.model.layers[0].mlp.up_proj
        layer = nn.layers.distributed.shard_linear(layer.to_quantized(32, 4) if quantized else layer, sharding)
        model.model.layers[0].mlp.up_proj = layer
        if quantized:
            with pytest.raises(GearbxError, match="the model is quantized already"):
                Gearbox(model)
            return
        gearbox = Gearbox(model, group_size=32)
        kind = type(layer).__name__
        assert gearbox.unmanaged == {"model.layers.0.mlp.up_proj": f"layers of class {kind} are not known"}
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == plain.weight_bytes_per_token(plain.ladder.top)

    def test_a_layer_whose_weight_the_model_reads_stays_dense(self):
        """Gemma 3n clips such weights before it multiplies by them; packed weights are codes."""
        model = tiny("gemma3n")
        before = model(PROMPT)
        gearbox = Gearbox(model, "8,16", format="rowwise")
        layer = "model.language_model.layers.0.altup.prediction_coefs"
        assert gearbox.unmanaged[layer] == "class Gemma3nAltUp reads its weight itself"
        gearbox.shift("low")
        assert mx.allclose(model(PROMPT), before, atol=0.2 * mx.abs(before).max().item()).item()


class TestTowers:
    """A part that reads images or sound: a text's tokens never pass through it."""

    def seeing(self):
        model = tiny_model()
        model.vision_tower = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(3, 64, 4))
        model.vision_tower.head = nn.Linear(64, 64)
        return model

    @pytest.mark.parametrize("manage", ["all", "mlp", "attention"])
    def test_stays_dense_and_is_no_part_of_a_token(self, manage):
        plain, seeing = Gearbox(tiny_model(), manage=manage), Gearbox(self.seeing(), manage=manage)
        assert [layer.path for layer in seeing.layers] == [layer.path for layer in plain.layers]
        reason = "reads images or sound, and is selected by manage 'everything'"
        assert seeing.unmanaged["vision_tower.layers.0"] == seeing.unmanaged["vision_tower.head"] == reason
        for gear in plain.ladder:
            assert seeing.weight_bytes_per_token(gear) == plain.weight_bytes_per_token(gear)

    def test_changes_gear_if_asked_for(self):
        plain, seeing = Gearbox(tiny_model()), Gearbox(self.seeing(), manage="everything")
        assert {layer.path for layer in seeing.layers} - {layer.path for layer in plain.layers} == {
            "vision_tower.layers.0",
            "vision_tower.head",
        }
        schedules = [cap_schedule_of(gearbox, None, {}) for gearbox in (plain, seeing)]
        assert schedules[0].read([0, 0, 1])[0] == schedules[1].read([0, 0, 1])[0]
        seeing.shift("low")
        assert seeing.model.vision_tower.layers[0].bits == 4
        for gear in plain.ladder:
            assert seeing.weight_bytes_per_token(gear) == plain.weight_bytes_per_token(gear)

    def test_its_head_is_not_taken_for_the_models(self):
        model = tiny_model(tie_word_embeddings=True)
        model.vision_tower = nn.Sequential(nn.Linear(64, 64))
        model.vision_tower.head = nn.Linear(64, 64)
        assert "model.embed_tokens" in {layer.path for layer in Gearbox(model).layers}


class TestMixtures:
    @pytest.mark.some(41)
    @pytest.mark.parametrize("architecture", [name for name in CONFIGS if why_not(name) is None])
    def test_every_one_says_how_many_experts_a_token_uses(self, architecture):
        modules = dict(as_initialised(architecture).named_modules())
        found = {path for path, module in modules.items() if "weight" in module and experts_of(path, modules)}
        assert {chosen_experts(path, modules) for path in found} <= {1, 2}

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        "architecture", ["dbrx", "deepseek", "granitemoe", "kimi_linear", "laguna", "ernie4_5_moe"]
    )
    def test_experts_are_counted_by_the_share_that_a_token_uses(self, architecture):
        model = tiny(architecture)
        gearbox = Gearbox(model, group_size=32, kernels="mlx")
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == bytes_read(model, STEP)

    def test_one_that_does_not_say_is_counted_whole_with_a_warning(self):
        model = tiny_model("mixtral")
        for layer in model.layers:
            del layer.block_sparse_moe.num_experts_per_tok
        model.args.num_experts_per_tok = None
        with pytest.warns(GearbxWarning, match="layers.*block_sparse_moe.*: the model does not say how many experts"):
            gearbox = Gearbox(model)
        told = Gearbox(tiny_model("mixtral"))
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) > told.weight_bytes_per_token(told.ladder.top)

    def test_an_indexer_is_counted_as_in_long_contexts(self):
        model = tiny("deepseek_v32", index_topk=3)
        gearbox = Gearbox(model, group_size=32, kernels="mlx")
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == bytes_read(model, STEP)


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.linear_attn.in_proj_qkvz",  # Qwen3-Next
        "model.layers.0.cross_attn.q_proj",
        "decoder.block.0.layer.1.EncDecAttention.q",  # T5
        "model.transformer.blocks.0.att_proj",  # OLMo
        "model.transformer.blocks.0.attn_out",
        "encoder.block.0.layer.0.SelfAttention.q",
    ],
)
def test_attention_has_many_names(path):
    assert is_attention(path, nn.Linear(1, 1))


@pytest.mark.parametrize("path", ["model.layers.0.mlp.up_proj", "model.layers.0.post_attention_layernorm", "lm_head"])
def test_what_only_mentions_attention_is_none(path):
    assert not is_attention(path, nn.Linear(1, 1))


def test_manage_attention_has_the_linear_attention_of_a_model():
    gearbox = Gearbox(tiny_model("qwen3_next"), manage="attention")
    managed = {layer.path.split(".")[3] for layer in gearbox.layers}
    assert managed == {"linear_attn", "self_attn"}
