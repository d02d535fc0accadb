"""Every unpromised assumption about MLX and mlx-lm, by its name, and what is switched off where it may not hold.

Where a test fails after an upgrade: mend gearbx_mlx/compat, then raise its TESTED and the pins in pyproject.toml.
"""

import ast
import copy
import importlib
import inspect
import io
import pkgutil
import re
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
import numpy as np
import pytest
from architectures import tiny
from conftest import PROMPT, tiny_model
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models import gemma3_text, llama, phi3, qwen2, qwen3
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.server import ResponseGenerator

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless, Route, Static, load, stream_generate
from gearbx_mlx.compat import arrays, classes, latent_attention, loops, versions
from gearbx_mlx.compat.classes import COMPILED, CompiledSteps
from gearbx_mlx.compat.loops import streaming_with as stream_of
from gearbx_mlx.decoding.rows import Verification, Verifier
from gearbx_mlx.formats import block
from gearbx_mlx.formats.block import NativeBlock

ROOT = Path(__file__).parents[2]
MODELS = Path(next(iter(mlx_lm.models.__path__)))
QUIETLY = pytest.mark.filterwarnings("ignore::gearbx_mlx.GearbxWarning")
NEWER = {"mlx": "0.33.1", "mlx-lm": "0.33.0"}


@pytest.fixture
def newer(monkeypatch):
    """MLX and mlx-lm of an untested version."""
    monkeypatch.setattr(versions, "installed_version", lambda: NEWER)
    monkeypatch.setattr(versions, "_warned", set())
    yield
    for made in (loops.streaming_with, loops.batch_step, loops.first_step):
        made.cache_clear()


def classes_of_models():
    """Every importable class of a module in mlx_lm.models."""
    for found in pkgutil.iter_modules([str(MODELS)]):
        if found.name == "olmo":  # ends the process where a package is missing
            continue
        module = importlib.import_module(f"mlx_lm.models.{found.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
                yield kind


class TestVersions:
    def test_the_installed_ones_are_tested(self):
        assert versions.untested() == ""

    def test_pins_match_tested_versions(self):
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for name, tested in versions.TESTED_VERSIONS.items():
            major, minor = map(int, tested.split("."))
            pins = re.findall(rf'"{name}(?:\[\w+\])?>=([\d.]+),<([\d.]+)[;"]', project)
            assert pins
            assert len(pins) == len(re.findall(rf'"{name}(?:\[\w+\])?[<>=]', project))
            for least, below in pins:
                assert least.split(".")[:2] == [str(major), str(minor)]
                assert below == f"{major}.{minor + 1}"


class TestArrays:
    def test_a_type_is_copied_by_its_name(self):
        assert copy.deepcopy(mx.bfloat16) == mx.bfloat16
        assert arrays.dtype_named(arrays.dtype_name(mx.float16)) == mx.float16

    def test_random_key_is_writable_array(self):
        mx.random.seed(3)
        with arrays.same_random_numbers():
            first = mx.random.uniform(shape=(4,))
            mx.eval(first)
        assert mx.array_equal(mx.random.uniform(shape=(4,)), first)

    def test_separate_state_matches_its_seed(self):
        mx.random.seed(5)
        expected = mx.random.uniform(shape=(4,))
        mx.random.seed(0)
        state = arrays.OwnRandomState(5)
        with state.drawn():
            drawn = mx.random.uniform(shape=(4,))
        mx.eval(drawn, expected)
        assert mx.array_equal(drawn, expected)

    def test_separate_state_leaves_no_graph(self):
        state = arrays.OwnRandomState(5)
        for _ in range(3):
            with state.drawn():
                pass
        with arrays.same_random_numbers():
            pass
        graphs = io.StringIO(), io.StringIO()
        mx.export_to_dot(graphs[0], mx.random.state[0])
        mx.export_to_dot(graphs[1], state.state)
        assert all("->" not in graph.getvalue() for graph in graphs)

    def test_memory_writes_show_in_array(self):
        array = mx.zeros(5, mx.uint8)
        mx.eval(array)
        arrays.memory_of(array)[1:3] = b"\x07\x08"
        assert array.tolist() == [0, 7, 8, 0, 0]

    def test_copied_memory_is_never_streamed(self, monkeypatch):
        monkeypatch.setattr(arrays, "memory_is_shared", lambda: False)
        with pytest.raises(GearbxError, match="residency stream: this version of MLX copies"):
            arrays.memory_of(mx.zeros(5, mx.uint8))


class TestClasses:
    def test_class_copies_share_code_and_others_not(self):
        assert classes.code_of(llama.TransformerBlock) == classes.code_of(qwen3.TransformerBlock)
        assert classes.code_of(llama.TransformerBlock) != classes.code_of(gemma3_text.TransformerBlock)
        assert classes.code_of(llama.Attention) != classes.code_of(qwen3.Attention)

    def test_subclass_replaces_functions_only_for_itself(self):
        swiglu, called = llama.swiglu, []

        def noted(gate, up):
            called.append(gate.shape)
            return swiglu(gate, up)

        kind = classes.calling(llama.MLP, {"swiglu": (swiglu, noted)})
        mlp = llama.MLP(tiny("llama").args)
        mlp(mx.zeros((1, 1, mlp.gate_proj.weight.shape[-1])))
        assert called == []
        with classes.of_classes([(mlp, kind)]):
            mlp(mx.zeros((1, 1, mlp.gate_proj.weight.shape[-1])))
        assert len(called) == 1
        assert type(mlp) is llama.MLP
        assert classes.calling(llama.MLP, {"swiglu": (noted, swiglu)}) is None

    def test_module_is_dictionary_with_attributes(self):
        class Other(nn.Linear):
            pass

        linear = nn.Linear(4, 2)
        linear.freeze(keys=["bias"])
        other = classes.as_class(linear, Other)
        assert type(other) is Other
        assert other.weight is linear.weight
        assert other.trainable_parameters().keys() == {"weight"}
        other.unfreeze()
        assert linear.trainable_parameters().keys() == {"weight"}
        assert classes.bare(nn.Linear).parameters() == {}


class TestCaches:
    def test_batch_entries_are_counted_by_idx(self):
        cache = BatchKVCache([1, 0])
        cache.update_and_fetch(mx.zeros((2, 1, 3, 4)), mx.zeros((2, 1, 3, 4)))
        assert loops.positions_in(cache) == loops.POSITIONS[BatchKVCache](cache) == cache._idx == 3
        assert loops.counted(cache) == 3
        loops.set_entries(cache, 2)
        assert cache.offset.tolist() == [1, 2]

    def test_trimmed_window_continues_like_short_one(self):
        keys = mx.random.normal((1, 1, 6, 4))
        longer, shorter = RotatingKVCache(max_size=8), RotatingKVCache(max_size=8)
        longer.update_and_fetch(keys, keys)
        shorter.update_and_fetch(keys[..., :4, :], keys[..., :4, :])
        loops.cut_window(longer, 2)
        for _ in range(6):
            new = mx.random.normal((1, 1, 1, 4))
            assert mx.array_equal(longer.update_and_fetch(new, new)[0], shorter.update_and_fetch(new, new)[0])
        assert longer._idx == shorter._idx

    def test_batch_counts_tokens_under_other_name(self):
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
        assert loops.offset_of(cache) == 3


class TestBatches:
    @pytest.mark.parametrize(
        ("kind", "methods"),
        [
            (GenerationBatch, ["_step", "empty", "extend", "filter", "next"]),
            (PromptProcessingBatch, ["_copy", "empty", "prompt", "generate"]),
            (BatchGenerator, ["_make_batch", "_next", "insert_segments", "remove"]),
        ],
    )
    def test_mlx_lm_has_wrapped_methods(self, kind, methods):
        for method in methods:
            assert callable(vars(kind)[method] if method != "empty" else getattr(kind, method)), method

    def test_mlx_lm_batches_use_accessed_names(self):
        said = inspect.getsource(BatchGenerator)
        for name in ("_generation_batch", "_prompt_batch", "_unprocessed_sequences", "_old_wired_limit"):
            assert f"self.{name}" in said, name

    def test_sequence_is_emitted_up_to_its_end(self, demo):
        generator = Route().batch_generator(demo.model, demo.tokenizer, gearbox=Gearbox(demo.model, "16"))
        assert isinstance(generator, loops.StagedGenerator)
        generator.insert([[1, 2, 3]], max_tokens=[2])
        seen = []
        while not seen or seen[-1].finish_reason is None:
            seen += generator.next_generated()
        assert len(seen) == 2


class TestLoops:
    def test_log_probabilities_are_made_with_this_function(self):
        called = []

        def noted(logits):
            called.append(logits.shape)
            return mx.logsumexp(logits, axis=-1, keepdims=True)

        model, tokenizer = tiny_model(), load()[1]
        theirs = list(stream_of(None)(model, tokenizer, [1, 5, 9], 4))
        ours = list(stream_of(noted)(model, tokenizer, [1, 5, 9], 4))
        assert set(called) == {(1, 128)}
        assert len(called) >= len(ours)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.token == other.token
            assert mx.array_equal(mine.logprobs, other.logprobs)

    def test_batch_step_takes_sum_by_same_name(self):
        assert "logsumexp" in GenerationBatch._step.__code__.co_names
        assert loops.batch_step(None) is GenerationBatch._step

    def test_are_unchanged_with_newer_versions(self, newer):
        assert stream_of.__wrapped__(lambda logits: 1 / 0) is mlx_lm.stream_generate


@pytest.mark.parametrize("module", [llama, qwen2, qwen3, phi3])
def test_layers_run_in_order_with_one_mask(module):
    """A chain of blocks replaces them; and only the head follows it."""
    model = tiny_model(module.__name__.rpartition(".")[2])
    x = model.model.embed_tokens(PROMPT)
    for layer in model.layers:
        x = layer(x, "causal", None)
    head = model.model.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
    assert mx.array_equal(head(model.model.norm(x)), model(PROMPT))
    assert classes.code_of(type(model.model)) in block.LAYERED
    assert classes.code_of(type(model)) in block.WHOLE_MODELS


class TestLatentAttention:
    def test_two_path_classes_of_mlx_lm_are_known(self):
        found = set()
        for kind in classes_of_models():
            names_used = getattr(kind.__call__, "__code__", None) and {*kind.__call__.__code__.co_names}
            if names_used and names_used >= latent_attention.ABSORBED:
                assert latent_attention.one_token_class(kind) is not None, kind
                found.add(kind.__module__.rpartition(".")[2])
        assert found >= {"deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash", "kimi_linear"}

    def test_a_class_without_source_is_not(self):
        made = {}
        exec("def call(self, x):\n    return self.embed_q(x) if x.shape[1] == 1 else x", made)
        assert latent_attention.one_token_class(type("Made", (nn.Module,), {"__call__": made["call"]})) is None


class Reader(nn.Module):
    def __call__(self, x):
        def inner():
            return self.experts.gate.weight

        return x @ self.proj.weight.T + inner() + self.norm(x)


class TestReadWeights:
    def test_names_are_found_in_class_source(self):
        assert classes.weights_read_by(Reader) == {"proj", "experts.gate"}

    def test_without_source_every_name_counts(self):
        made = {}
        exec("def call(self, x):\n    return x @ self.proj.weight.T", made)
        kind = type("Made", (nn.Module,), {"__call__": made["call"]})
        assert "proj" in classes.weights_read_by(kind)


def test_compiled_functions_belong_to_classes():
    assert isinstance(mx.compile(lambda x: x + 1), COMPILED)


class TestNames:
    def test_mlx_lm_has_them(self, demo):
        rope = Llama3RoPE(8, scaling_config={"factor": 8.0, "rope_type": "llama3"})
        assert classes.frequencies_of(rope).shape == (4,)
        assert classes.generation_stream().device == mx.default_device()
        assert classes.model_classes({"model_type": "llama"})[0] is llama.Model
        assert classes.own_tokenizer(demo.tokenizer) is not demo.tokenizer

    def test_mlx_lm_tokenization_reads_known_attributes(self):
        assert [*inspect.signature(ResponseGenerator._tokenize).parameters] == ["self", "tokenizer", "request", "args"]
        text = inspect.getsource(ResponseGenerator._tokenize)
        assert {*re.findall(r"\b((?:self|args)\.[\w.]*)", text)} == {
            "self.model_provider.processor",
            "self.model_provider.cli_args.chat_template_args",
            "args.chat_template_kwargs",
        }


REACHES = ("exec", "eval", "inspect.getsource", "dis.get_instructions", "FunctionType", "types.FunctionType")


def reaches_inside(file: Path) -> list[str]:
    """What a module takes from mlx-lm and MLX without a promise of theirs."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("mlx", "mlx_lm", "transformers")):
            found += [alias.name for alias in node.names if alias.name.startswith("_")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in REACHES:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.Attribute) and node.attr in ("__class__", "co_code"):
            found += [node.attr] if node.attr == "co_code" or isinstance(node.ctx, ast.Store) else []
    return found


@pytest.mark.slow
def test_only_listed_private_names_are_used():
    package = ROOT / "gearbx_mlx"
    files = {path.relative_to(package).as_posix(): reaches_inside(path) for path in package.rglob("*.py")}
    assert {name: found for name, found in files.items() if found and not name.startswith("compat/")} == {}
    assert {*files["compat/classes.py"]} == {"_get_classes", "FunctionType", "co_code", "inspect.getsource"}


class TestNewerVersions:
    """What depends on the assumptions is off, with one message, and results are those of stock classes."""

    def test_warning_is_shown_once(self, newer):
        with pytest.warns(GearbxWarning, match=r"are off: mlx is 0\.33\.1, and gearbx-mlx is tested"):
            Gearbox(tiny_model(), "16")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Gearbox(tiny_model(), "16")

    @QUIETLY
    @pytest.mark.parametrize("name", ["llama", "gemma3_text"])
    def test_blocks_and_functions_remain_mlx_lms(self, newer, native, name):
        model = tiny_model(name)
        gearbox = Gearbox(model, "4,16", kernels="native")
        kinds = {type(module) for module in model.modules()}
        assert not any(issubclass(kind, NativeBlock) or classes.stock_class(kind) for kind in kinds)
        gearbox.shift("high")
        logits, stock = model(mx.array([[1, 5, 9]])), tiny_model(name)(mx.array([[1, 5, 9]]))
        assert np.allclose(np.array(logits), np.array(stock), atol=1e-4)

    @QUIETLY
    def test_sliding_window_drafts_leave_output_unchanged(self, newer, demo):
        gearbox = Gearbox(tiny_model("gemma3_text", sliding_window=8), "4,16")
        prompt = [1, 5, 9, 2, 7]
        texts = [
            [r.token for r in stream_generate(gearbox.model, demo.tokenizer, prompt, 30, mode=mode, gearbox=gearbox)]
            for mode in (Static(), Lossless(draft_length=3))
        ]
        assert texts[0] == texts[1]

    def test_latent_attention_is_named_before_generation(self, newer, demo):
        versions._warned.add(versions.untested())  # and warned about before
        gearbox = Gearbox(tiny_model("deepseek_v3", dtype=mx.bfloat16), "4,16", dtype="bfloat16")
        with pytest.warns(GearbxWarning, match="DeepseekV3Attention computes several tokens differently from one"):
            stream_generate(gearbox.model, demo.tokenizer, [1, 5, 9], mode=Lossless(), gearbox=gearbox)

    @QUIETLY
    def test_batches_are_refused(self, newer, demo):
        gearbox = Gearbox(demo.model, "16")
        with pytest.raises(GearbxError, match=r"batched generation needs tested versions: mlx is 0\.33\.1"):
            Route().batch_generator(demo.model, demo.tokenizer, gearbox=gearbox)

    @QUIETLY
    def test_compiled_step_under_other_name_is_refused(self, newer):
        model = tiny_model()
        steps = CompiledSteps(model)
        steps.change("low", "high")
        object.__setattr__(model.layers[0], "_decode", mx.compile(lambda x: x))
        with pytest.raises(GearbxError, match=r"layers\.0 keeps a compiled step of one gear as _decode"):
            steps.change("high", "low")


def test_a_cap_compiles_steps_again(monkeypatch):
    """Kimi K3's delta attention compiles a step if there is Metal; the step itself runs anywhere."""
    model = tiny("kimi_k3")
    model.eval()
    gearbox = Gearbox(model, "4,8,16", group_size=32, kernels="mlx")

    def logits():
        cache = make_prompt_cache(model)
        model(mx.arange(6)[None], cache=cache)
        computed = model(mx.array([[3]]), cache=cache)
        mx.eval(computed)
        return computed

    gearbox.cap({layer.path: 4 for layer in gearbox.layers})
    expected = logits()
    gearbox.cap({})
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert not mx.allclose(logits(), expected, atol=1e-3)
    gearbox.cap({layer.path: 4 for layer in gearbox.layers})
    assert mx.allclose(logits(), expected, atol=1e-5)


def test_several_tokens_have_the_bits_of_single_ones():
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "16", dtype="bfloat16")
    alone, together = make_prompt_cache(model), make_prompt_cache(model)
    for cache in (alone, together):
        model(mx.arange(20)[None], cache=cache)
    tokens = list(range(30, 38))
    rows = Verification(Verifier(gearbox, gearbox.ladder.top), tokens, together)
    single = mx.concatenate([model(mx.array([[token]]), cache=alone) for token in tokens], axis=1)
    assert mx.array_equal(rows.logits, single)


def test_class_with_bidirectional_attention_is_named(demo):
    gearbox = Gearbox(tiny("phi3small"), "4,16", group_size=32)
    with pytest.warns(GearbxWarning, match="mlx_lm.models.phi3small computes several tokens differently from one"):
        stream_generate(gearbox.model, demo.tokenizer, PROMPT[0].tolist(), mode=Lossless(), gearbox=gearbox)
