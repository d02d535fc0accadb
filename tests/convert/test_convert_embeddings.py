"""Embeddings in a geared checkpoint: the lowest gear has them as mlx_lm.convert packs them, the others exactly."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from architectures import as_initialised
from conftest import PROMPT, every_gear, save_model, tiny_model
from mlx_lm.models import llama
from mutations import edit
from refusals import assert_not_loaded

import gearbx_mlx
from gearbx_mlx import Gearbox
from gearbx_mlx.convert import convert as convert_model

FORMATS = {"planes": "4,8,16", "affine": "4,8,16", "rowwise": "4,16", "groupwise": "4,16"}
FORMATS |= {"codebook": "3,16", "codebook-library": "2,16"}
WITHOUT_ORIGINAL = {"planes": "4,8", "affine": "4,8", "rowwise": "4,8", "codebook": "3,5"}
TABLES = {  # model -> its tables that are no output heads
    "untied": ["model.embed_tokens"],
    "tied": [],
    "gpt2": ["model.wpe"],
    "gemma3n": ["model.language_model.embed_tokens_per_layer"],
    "gemma4": ["language_model.model.embed_tokens_per_layer"],
}
GROUP = 32


def original(name: str, **change: object) -> nn.Module:
    if name in ("tied", "untied"):
        return tiny_model(dtype=mx.bfloat16, tie_word_embeddings=name == "tied", **change)
    model = as_initialised(name).eval()
    model.set_dtype(mx.bfloat16)
    return model


@pytest.fixture
def convert(tmp_path):
    """(model, keywords) -> the directories of the original and of the checkpoint."""

    def run(name: str, change: dict | None = None, **keywords: object):
        save_model(original(name, **(change or {})), tmp_path / "original")
        settings = {"q_group_size": GROUP} | keywords
        return tmp_path / "original", convert_model(tmp_path / "original", tmp_path / "geared", **settings)

    return run


def tables_in(directory) -> dict:
    return json.loads((directory / "gears.json").read_text())["tables"]


def array_bytes(directory, name: str) -> int:
    return sum(array.nbytes for array in mx.load(str(directory / name)).values())


def gearbox_of(directory, ladder=None, **keywords: object) -> Gearbox:
    return Gearbox(gearbx_mlx.load(directory)[0], ladder, kernels="mlx", **keywords)


class TestBase:
    @pytest.mark.some(4)
    @pytest.mark.parametrize("format", ["planes", "affine"])
    @pytest.mark.parametrize("name", TABLES)
    def test_size_matches_mlx_lm_conversion(self, convert, tmp_path, name, format):
        source, out = convert(name, format=format)
        mlx_lm.convert(str(source), str(tmp_path / "mlx"), quantize=True, q_bits=4, q_group_size=GROUP)
        ours, theirs = (mx.load(str(path / "model.safetensors")) for path in (out, tmp_path / "mlx"))
        assert {name: array.shape for name, array in ours.items()} == {n: array.shape for n, array in theirs.items()}
        assert array_bytes(out, "model.safetensors") == array_bytes(tmp_path / "mlx", "model.safetensors")
        assert list(tables_in(out)) == TABLES[name]

    def test_only_gear_includes_everything(self, convert, tmp_path):
        _, out = convert("tied", gears="4")
        assert array_bytes(out, "gears.safetensors") == 0
        gearbox = gearbox_of(out)
        stock = mlx_lm.load(str(out))[0]
        stock.set_dtype(mx.float32)
        assert mx.array_equal(gearbox.model(PROMPT), stock(PROMPT)).item()

    @pytest.mark.some(4)
    @pytest.mark.parametrize("format", ["planes", "affine"])
    @pytest.mark.parametrize("name", [*TABLES, "qwen3_moe", "gpt_neox"])
    def test_mlx_lm_runs_base_as_lowest_gear(self, convert, name, format):
        _, out = convert(name, format=format, dtype="float32")  # MLX's CPU kernels are slow in half precision
        stock, tokenizer = mlx_lm.load(str(out))
        kinds = {path: type(module) for path, module in stock.named_modules()}
        assert nn.QuantizedLinear in kinds.values()
        assert all(kinds[path] is nn.QuantizedEmbedding for path in TABLES.get(name, ()))
        assert isinstance(mlx_lm.generate(stock, tokenizer, "a b c", max_tokens=4), str)
        gearbox = gearbox_of(out)
        assert mx.array_equal(gearbox.model(PROMPT), stock(PROMPT)).item()

    @pytest.mark.parametrize("format", ["rowwise", "codebook"])
    def test_other_formats_keep_original_embeddings(self, convert, format):
        source, out = convert("untied", format=format, gears=FORMATS[format])
        assert tables_in(out) == {}
        ours, theirs = (mx.load(str(path / "model.safetensors")) for path in (out, source))
        assert all(mx.array_equal(ours[name], theirs[name]).item() for name in theirs)

    @pytest.mark.parametrize(("answer", "rows"), [({"bits": 8, "group_size": GROUP}, 8), (False, None), (True, 4)])
    def test_follows_model_class_predicate(self, convert, monkeypatch, answer, rows):
        def predicate(model, path, module):
            return answer if path == "model.embed_tokens" else hasattr(module, "to_quantized")

        monkeypatch.setattr(llama.Model, "quant_predicate", predicate, raising=False)
        _, out = convert("untied")
        assert tables_in(out).get("model.embed_tokens", {}).get("rows") == rows
        table = mlx_lm.load(str(out))[0].model.embed_tokens
        assert getattr(table, "bits", None) == rows
        gearbox = gearbox_of(out)
        gearbox.shift("mid")
        assert (type(gearbox.model.model.embed_tokens) is nn.Embedding) == (rows != 8)


class TestGears:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("name", ["untied", "tied", "gemma4"])
    @pytest.mark.parametrize("format", FORMATS)
    def test_top_gear_is_original_in_every_format(self, convert, name, format):
        source, out = convert(name, format=format, gears=FORMATS[format])
        saved = gearbox_of(out)
        saved.shift("high")
        model = gearbx_mlx.load(source)[0]
        model.set_dtype(saved.compute_dtype)
        assert mx.array_equal(saved.model(PROMPT), model(PROMPT)).item()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("name", ["untied", "tied"])
    @pytest.mark.parametrize("format", WITHOUT_ORIGINAL)
    def test_top_gear_without_16_bits_has_exact_rows(self, convert, name, format):
        source, out = convert(name, format=format, gears=WITHOUT_ORIGINAL[format])
        saved = gearbox_of(out)
        made = gearbox_of(source, WITHOUT_ORIGINAL[format], format=format, group_size=GROUP)
        for gearbox in (saved, made):
            gearbox.shift("high")
        assert mx.array_equal(saved.model(PROMPT), made.model(PROMPT)).item()
        saved.shift("low")
        assert mx.isfinite(saved.model(PROMPT)).all().item()

    @pytest.mark.parametrize(
        ("name", "format", "more"),
        [("tied", "rowwise", {}), ("tied", "codebook", {}), ("untied", "rowwise", {"embeddings": "keep"})],
    )
    def test_base_unsupported_by_mlx_lm_is_lowest_gear(self, convert, name, format, more):
        source, out = convert(name, format=format, gears=WITHOUT_ORIGINAL[format], **more)
        model = gearbx_mlx.load(out)[0]
        made = gearbox_of(source, WITHOUT_ORIGINAL[format], format=format)
        made.shift("low")
        expected = made.model(PROMPT)
        assert mx.allclose(model(PROMPT).astype(mx.float32), expected.astype(mx.float32), atol=0.05).item()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("name", TABLES)
    def test_kept_embeddings_have_original_rows(self, convert, name):
        source, out = convert(name, embeddings="keep")
        assert tables_in(out) == {}
        quantization = json.loads((out / "config.json").read_text())["quantization"]
        assert not any(quantization[path] for path in TABLES[name])
        saved, made = gearbox_of(out), gearbox_of(source, "4,8,16", group_size=GROUP)
        for _ in every_gear(saved, made, gears=("low", "mid", "high")):
            assert mx.array_equal(saved.model(PROMPT), made.model(PROMPT)).item()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["tables"]["model.embed_tokens"].update(kind="embedding"), "kind is embedding, which is not"),
        (lambda c: c["layers"].update(c.pop("tables")), "kind is table, which is not allowed there"),
        (lambda c: c["tables"]["model.embed_tokens"].update(rows=8), "rows is 8, which is only for embeddings with"),
        (lambda c: c["tables"]["model.embed_tokens"]["gears"].pop("16"), "has no key 16, which the 8-bit gear"),
        (lambda c: c["tables"]["model.embed_tokens"]["gears"].pop("4"), "rows is 4, which is only for embeddings with"),
        (lambda c: c["tables"].clear(), "does not name"),
        (lambda c: c["tables"]["model.embed_tokens"].update(shape=[64, 64]), "and gears.json needs"),
        (lambda c: c["layers"]["lm_head"].update(rows=4), "rows is 4, which is only for embeddings with"),
    ],
)
def test_damaged_gears_json_is_refused(convert, change, words):
    _, out = convert("untied")
    edit(out / "gears.json", change)
    assert_not_loaded(out, words)
