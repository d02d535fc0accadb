"""Adapters that do not fit, are damaged or missing, or come too late: each gets a one-line error."""

import json

import mlx.core as mx
import pytest
from conftest import PROMPT, save_model, tiny_model, weights_of
from test_adapters import adapted_model, far, loaded, save_adapter

from gearbx_mlx import convert


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with an original and a geared checkpoint that only gearbx-mlx can run."""
    root = tmp_path_factory.mktemp("models")
    save_model(adapted_model(), root / "original")
    convert(model=str(root / "original"), mlx_path=str(root / "geared"), gears="4,8", format="rowwise")
    return root


class TestRefused:
    """The error is one line with the adapter and the remedy, on an original and on a geared checkpoint."""

    @pytest.fixture(params=["original", "geared"])
    def source(self, models, request):
        return models / request.param

    @pytest.fixture
    def adapter(self, tmp_path):
        return save_adapter(adapted_model(), tmp_path / "adapter", "dora")

    def refused(self, command, source, adapter, *words):
        done = command("generate", "--model", source, "--adapter-path", adapter, "-m", 2)
        assert (done.status, done.out) == (2, "")
        assert len(done.err.splitlines()) == 1
        assert all(str(word) in done.err for word in (adapter, *words)), done.err

    @pytest.mark.some(10)
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"fine_tune_type": "qlora"}, 'fine_tune_type is "qlora"'),
            ({"fine_tune_type": "lora"}, "model.layers.0.mlp.down_proj.m, which is not in this model with this"),
            ({"lora_parameters": None}, "lora_parameters is missing"),
            ({"lora_parameters": {"rank": 0, "scale": 1.0}}, "lora_parameters.rank is 0"),
            ({"lora_parameters": {"rank": 4, "alpha": 1.0}}, "lora_parameters has no field 'scale'"),
            ({"lora_parameters": {"rank": 5, "scale": 1.0}}, "has the shape [128, 4], and this model needs [128, 5]"),
            ({"lora_parameters": {"rank": 4, "scale": 1.0, "keys": ["nothing"]}}, "is not in this model"),
            ({"num_layers": 1}, "model.layers.0."),
            ({"num_layers": "two"}, 'num_layers is "two"'),
        ],
    )
    def test_settings(self, command, source, adapter, change, words):
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        self.refused(command, source, adapter, words, "trained on this model" if "model" in words else "mlx_lm.lora")

    @pytest.mark.parametrize("content", ["[]", "{", "", "\x00"])
    def test_settings_that_are_no_object(self, command, source, adapter, content):
        (adapter / "adapter_config.json").write_text(content)
        self.refused(command, source, adapter, "adapter_config.json: cannot be read as the settings of an adapter")

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
    def test_a_file_that_is_missing(self, command, source, adapter, name):
        (adapter / name).unlink()
        self.refused(command, source, adapter, f"no {name} there", "give the directory that mlx_lm.lora wrote")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda arrays: arrays.popitem(), "which its settings ask for"),
            (lambda arrays: arrays.clear(), "which its settings ask for"),
            (lambda arrays: arrays.update({"x.lora_a": mx.zeros(2)}), "has x.lora_a, which is not in this model"),
            (lambda arrays: arrays.update({n: a[1:] for n, a in arrays.items()}), "has the shape"),
            (lambda arrays: arrays.update({n: a.astype(mx.int32) for n, a in arrays.items()}), "type int32"),
        ],
        ids=["one missing", "all missing", "one more", "shapes", "integers"],
    )
    def test_arrays(self, command, source, adapter, change, words):
        file = str(adapter / "adapters.safetensors")
        arrays = dict(mx.load(file))
        mx.eval(arrays)
        change(arrays)
        mx.save_safetensors(file, arrays)
        self.refused(command, source, adapter, words)

    def test_truncated_arrays(self, command, source, adapter):
        file = adapter / "adapters.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(command, source, adapter, "adapters.safetensors: damaged or truncated")

    def test_an_adapter_of_another_model(self, command, source, tmp_path):
        other = save_adapter(tiny_model("llama", intermediate_size=192), tmp_path / "other", "lora")
        self.refused(command, source, other, "and this model needs", "give an adapter that was trained on this model")

    def test_no_directory(self, command, source, tmp_path):
        self.refused(command, source, tmp_path / "none", "does not exist; give the directory that mlx_lm.lora wrote")

    def test_a_full_fine_tune_on_gears(self, command, models, tmp_path):
        model = adapted_model()
        expected = model(PROMPT)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
        arrays = {name: array * 2 for name, array in weights_of(model).items() if "layers.1" in name}
        mx.save_safetensors(str(tmp_path / "full" / "adapters.safetensors"), arrays)
        words = "is a full fine-tune, whose layers the gears do not have", "fuse it into the original"
        self.refused(command, models / "geared", tmp_path / "full", *words)
        assert far(loaded(models / "original", tmp_path / "full")(PROMPT), expected) > 0.1
