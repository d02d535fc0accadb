"""What is known of a model before a weight of it is read."""

import mlx.core as mx
import mlx_lm
import pytest
from conftest import active_memory, save_model, tiny_model
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from gearbx_mlx import convert
from gearbx_mlx.cli.decide import JustGears
from gearbx_mlx.cli.describe import Description, describe
from gearbx_mlx.cli.flags import LayoutSettings, ModelSettings
from gearbx_mlx.gears.in_place import own_codes
from gearbx_mlx.gears.ladder import Ladder
from gearbx_mlx.loading import DEMO_MODEL


def described(place) -> Description:
    return describe(JustGears(ModelSettings(str(place)), LayoutSettings(gears=Ladder.parse("4,16"))))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described") / "original"
    save_model(tiny_model(dtype=mx.float16, vocab_size=512), folder)
    return folder


def test_headers_describe_weights(original):
    weights, _ = load_model(original)
    before = active_memory()
    found = described(original)
    assert active_memory() == before
    assert found.size == sum(array.nbytes for _, array in tree_flatten(weights.parameters()))
    assert (found.dtype, found.architecture, found.vocabulary) == ("F16", "llama", 512)
    assert found.original


@pytest.mark.parametrize(
    "packing",
    [{"q_bits": 8}, {"q_bits": 6, "q_group_size": 32}, {"q_mode": "mxfp4", "q_bits": 4, "q_group_size": 32}],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_headers_name_codes_for_mlx_lm(architecture, packing, tmp_path):
    save_model(tiny_model(architecture, dtype=mx.bfloat16), tmp_path / "original")
    mlx_lm.convert(str(tmp_path / "original"), str(tmp_path / "coded"), quantize=True, **packing)
    found, loaded = described(tmp_path / "coded").codes, own_codes(load_model(tmp_path / "coded", lazy=True)[0])
    assert vars(found) == {name: value for name, value in vars(loaded).items() if name != "modules"}


def test_mixed_recipe_has_most_common_bits(original, tmp_path):
    def recipe(path, module):
        return {"bits": 6, "group_size": 64} if "down_proj" in path else {"bits": 4, "group_size": 64}

    mlx_lm.convert(str(original), str(tmp_path / "mixed"), quantize=True, quant_predicate=recipe)
    codes = described(tmp_path / "mixed").codes
    assert (codes.bits, codes.widths, codes.nested) == (4, (4, 6), True)


def test_gears_are_read_from_checkpoint(original, tmp_path):
    convert(str(original), tmp_path / "geared", gears="4,8")
    found = described(tmp_path / "geared")
    assert found.saved.gears == (4, 8)
    assert found.codes is None


def test_a_command_looks_a_hub_name_up_once(command, monkeypatch):
    asked = []

    def download(name, **keywords):
        asked.append(name)
        return str(DEMO_MODEL)

    monkeypatch.setattr("gearbx_mlx.loading.snapshot_download", download)
    assert command("generate", "--model", "somebody/model", "--draft-model", "somebody/draft", "-m", 2).status == 0
    assert sorted(asked) == ["somebody/draft", "somebody/model"]
