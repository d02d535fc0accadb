"""The output head, found from how a model's code uses its tables; the length of the logits; tables in the costs."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import CONFIGS, VOCABULARY, as_initialised
from conftest import PROMPT, tiny_model, weights_of
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.gears.discovery import tied_head, vocabulary

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
def test_the_vocabulary_is_the_length_of_the_logits_and_asking_changes_nothing(name):
    model = as_initialised(name).eval()
    before = state(model)
    found = vocabulary(model)
    assert state(model) == before
    if name not in NEEDS_METAL:
        assert found == model(PROMPT, cache=make_prompt_cache(model)).shape[-1]


@pytest.mark.some(6)
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NEEDS_METAL - {"baichuan_m1", "prism_hadamard_qwen35"}))
def test_the_tied_head_is_the_table_whose_rows_are_the_logits(name):
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
def test_a_table_of_one_row_per_layer_is_no_head_and_counts_a_row_a_token(name):
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


@pytest.mark.parametrize("name", ["llama4_text", "minicpm", "seed_oss"])
def test_a_head_that_stays_dense_says_why_and_is_read_whole(name):
    model = tied(name).eval()
    total = sum(array.nbytes for array in weights_of(model).values())
    gearbox = gear(model)
    assert "reads its weight itself" in gearbox.unmanaged["model.embed_tokens"]
    assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == total
    assert "model.embed_tokens: dense (class" in gearbox.describe()


class Table(nn.Embedding):
    """A class outside mlx-lm."""


def test_a_head_of_an_unknown_class_stays_dense_and_says_so():
    model = tiny_model(tie_word_embeddings=True)
    table = Table(VOCABULARY, 64)
    model.model.embed_tokens = table
    gearbox = gear(model)
    assert gearbox.unmanaged == {"model.embed_tokens": "output heads of class Table are not known"}
    total = sum(array.nbytes for array in weights_of(model).values())
    assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == total


def test_rows_that_are_no_tokens_do_not_count_as_vocabulary():
    model = tiny_model()
    model.model.embed_tokens = nn.Embedding(VOCABULARY + 64, 64)  # padded, beside a head that is not
    assert vocabulary(model) == VOCABULARY
    assert tied_head(model) is None


def test_a_model_that_makes_no_logits_of_tokens_has_no_vocabulary():
    with pytest.raises(GearbxError, match="Linear has no token embedding, so its vocabulary is unknown"):
        vocabulary(nn.Linear(4, 4))
