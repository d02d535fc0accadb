"""Layers of other kinds than a plain linear one: which of them change gear, and what is reported of the others."""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import CONFIGS, VOCABULARY, as_initialised, tiny, why_not
from architectures.reading import bytes_read
from conftest import PROMPT, every_gear, tiny_model, weights_of
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.decoding.governor import cap_schedule_of
from gearbx_mlx.errors import GearbxWarning
from gearbx_mlx.formats import FORMATS
from gearbx_mlx.gears.cost import chosen_experts, experts_of
from gearbx_mlx.gears.discovery import is_attention, own_matrices, tied_head, vocabulary

STEP = [1, 5, 9, 2, 7, 3, 11]
RG_LRU = "model.layers.0.temporal_block.rg_lru"
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
    def test_head_and_embedding_share_matrix_in_every_format(self, format):
        model = latent()
        gearbox = Gearbox(model, LADDERS.get(format, "4,8,16"), format=format, group_size=32)
        path, layer = "model.layers.0.self_attn.embed_q", model.model.layers[0].self_attn
        weight = layer.embed_q.weight
        assert path in {layer.path for layer in gearbox.layers}
        for gear in every_gear(gearbox):
            rows = stacked(layer.embed_q, weight.shape[1], transpose=False)
            columns = stacked(layer.embed_q, weight.shape[2], transpose=True)
            assert mx.allclose(rows, columns.swapaxes(-1, -2), atol=1e-6).item()
            error = (mx.linalg.norm(rows - weight) / mx.linalg.norm(weight)).item()
            assert error < 2.0**-gear.bits * 4
            assert gear.dense or error > 0

    def test_low_gear_equals_mlx_lm_quantization(self):
        model, stock = latent(), latent()
        gearbox = Gearbox(model, "4,8,16", format="affine", group_size=32, kernels="mlx")
        nn.quantize(
            stock, 32, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "embed_tok" not in path
        )
        gearbox.shift("low")
        assert mx.array_equal(model(PROMPT), stock(PROMPT)).item()


class TestOthers:
    @pytest.mark.parametrize("architecture", ["llama4_text", "seed_oss", "minicpm"])
    def test_head_using_embedding_weight_stays_dense(self, architecture):
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
            ("recurrent_gemma", f"{RG_LRU}.input_gate_weight", "a matrix that class RGLRU multiplies by itself"),
        ],
    )
    def test_matrices_multiplied_by_class_are_reported(self, architecture, path, reason):
        model = tiny(architecture)
        gearbox = Gearbox(model, group_size=32)
        assert gearbox.unmanaged[path] == reason
        numbers = re.sub(r"\d+", "[0-9,-]+", re.escape(path))
        assert re.search(rf"^{numbers}: dense \({reason}\)", gearbox.describe(), re.MULTILINE)
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == bytes_read(model, STEP)

    def test_layer_with_weight_read_by_model_stays_dense(self):
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
    def test_tower_stays_dense_and_outside_token_cost(self, manage):
        plain, seeing = Gearbox(tiny_model(), manage=manage), Gearbox(self.seeing(), manage=manage)
        assert [layer.path for layer in seeing.layers] == [layer.path for layer in plain.layers]
        reason = "reads images or sound, and is selected by manage 'everything'"
        assert seeing.unmanaged["vision_tower.layers.0"] == seeing.unmanaged["vision_tower.head"] == reason
        for gear in plain.ladder:
            assert seeing.weight_bytes_per_token(gear) == plain.weight_bytes_per_token(gear)

    def test_changes_gear_if_asked_for(self):
        plain, seeing = Gearbox(tiny_model()), Gearbox(self.seeing(), manage="everything")
        more = {layer.path for layer in seeing.layers} - {layer.path for layer in plain.layers}
        assert more == {"vision_tower.layers.0", "vision_tower.head"}
        schedules = [cap_schedule_of(gearbox, None, {}) for gearbox in (plain, seeing)]
        assert schedules[0].read([0, 0, 1])[0] == schedules[1].read([0, 0, 1])[0]
        seeing.shift("low")
        assert seeing.model.vision_tower.layers[0].bits == 4
        for gear in plain.ladder:
            assert seeing.weight_bytes_per_token(gear) == plain.weight_bytes_per_token(gear)


class TestMixtures:
    @pytest.mark.some(41)
    @pytest.mark.parametrize("architecture", [name for name in CONFIGS if why_not(name) is None])
    def test_every_class_reports_experts_per_token(self, architecture):
        modules = dict(as_initialised(architecture).named_modules())
        found = {path for path, module in modules.items() if "weight" in module and experts_of(path, modules)}
        assert {chosen_experts(path, modules) for path in found} <= {1, 2}

    def test_unreported_experts_are_counted_whole_with_warning(self):
        model = tiny_model("mixtral")
        for layer in model.layers:
            del layer.block_sparse_moe.num_experts_per_tok
        model.args.num_experts_per_tok = None
        with pytest.warns(
            GearbxWarning, match="layers.*block_sparse_moe.*: the number of experts per token is unknown"
        ):
            gearbox = Gearbox(model)
        told = Gearbox(tiny_model("mixtral"))
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) > told.weight_bytes_per_token(told.ladder.top)


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


NEEDS_METAL = {"bitnet", "muse_spark"}
PER_LAYER = {  # architecture -> its tied head and its table of one row per token and layer
    "gemma3n": ("model.language_model.embed_tokens", "model.language_model.embed_tokens_per_layer"),
    "gemma4": ("language_model.model.embed_tokens", "language_model.model.embed_tokens_per_layer"),
    "gemma4_text": ("model.embed_tokens", "model.embed_tokens_per_layer"),
}


def tied(name: str) -> nn.Module:
    """An instance whose config asks for a tied head, if its class can have one."""
    wish = {"tie_word_embeddings": True}
    if "text_config" in CONFIGS[name]:
        wish["text_config"] = CONFIGS[name]["text_config"] | wish
    return as_initialised(name, **wish)


def gear(model: nn.Module, ladder: str = "4,16", **keywords: object) -> Gearbox:
    return Gearbox(model, ladder, group_size=32, kernels="mlx", dtype="float32", **keywords)


def state(model: nn.Module) -> dict[str, dict]:
    """Path to everything that a module keeps, by identity."""
    return {
        path: {key: id(value) for key, value in (*m.items(), *vars(m).items())} for path, m in model.named_modules()
    }


@pytest.mark.some(43)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_vocabulary_is_logits_length_without_side_effects(name):
    model = as_initialised(name).eval()
    before = state(model)
    found = vocabulary(model)
    assert state(model) == before
    if name not in NEEDS_METAL:
        assert found == model(PROMPT, cache=make_prompt_cache(model)).shape[-1]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", ["llama", "dbrx"])  # which is one that cannot run without values
def test_vocabulary_of_tables_whose_weights_are_packed(name, head):
    model = tiny(name, mx.bfloat16, tie_word_embeddings=head)
    Gearbox(model, "4,16", format="exact", group_size=32)
    assert vocabulary(model) == VOCABULARY


@pytest.mark.some(6)
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NEEDS_METAL - {"baichuan_m1", "prism_hadamard_qwen35"}))
def test_tied_head_is_table_of_logits(name):
    model = tied(name).eval()
    token = mx.array([[0]])
    logits = model(token, cache=make_prompt_cache(model))
    heads = []
    for path, module in model.named_modules():
        if type(module) is nn.Embedding and len(module.weight) >= logits.shape[-1]:
            whole = module.weight
            module.weight = mx.concatenate([whole[:10], whole[10:] * 2])  # no row that the token looks up
            if not mx.array_equal(model(token, cache=make_prompt_cache(model)), logits).item():
                heads.append(path)
            module.weight = whole
    assert heads == ([] if (found := tied_head(model)) is None else [found])


@pytest.mark.parametrize("name", PER_LAYER)
def test_per_layer_table_counts_row_per_token(name):
    head, per_layer = PER_LAYER[name]
    model = as_initialised(name).eval()
    sizes = {path: array.nbytes for path, array in weights_of(model).items()}
    gearbox = gear(model)
    assert head in {layer.path for layer in gearbox.layers}
    read = gearbox.weight_bytes_per_token(gearbox.ladder.top)
    rows = sizes[f"{per_layer}.weight"] // VOCABULARY
    others = sum(size for path, size in sizes.items() if path != f"{per_layer}.weight" and "tower" not in path)
    assert read == others + rows
    assert gearbox.weight_bytes_per_token(gearbox.ladder.top, positions=3) == others + 3 * rows


class Table(nn.Embedding):
    """A class outside mlx-lm."""


def test_head_of_unknown_class_stays_dense():
    model = tiny_model(tie_word_embeddings=True)
    table = Table(VOCABULARY, 64)
    model.model.embed_tokens = table
    gearbox = gear(model)
    assert gearbox.unmanaged == {"model.embed_tokens": "output heads of class Table are not known"}
    total = sum(array.nbytes for array in weights_of(model).values())
    assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == total


def test_padding_rows_are_excluded_from_vocabulary():
    model = tiny_model()
    model.model.embed_tokens = nn.Embedding(VOCABULARY + 64, 64)  # padded, beside a head that is not
    assert vocabulary(model) == VOCABULARY
    assert tied_head(model) is None


def test_model_without_token_logits_has_no_vocabulary():
    with pytest.raises(GearbxError, match="Linear has no token embedding; use a language model"):
        vocabulary(nn.Linear(4, 4))


def test_matrix_has_several_rows_and_columns():
    module = nn.Module()
    module.vector, module.row, module.column, module.matrix = mx.ones(8), mx.ones((1, 8)), mx.ones((8, 1)), mx.eye(2)
    assert [*own_matrices("mixer", module)] == ["mixer.matrix"]
