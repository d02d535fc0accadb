"""The study compare-llama-cpp, as far as it runs without llama.cpp."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal, tiny_model, weights_of
from pages import fill

from gearbx_mlx import GearbxError
from research import llama_cpp
from research.llama_cpp import LENGTHS, THEIRS, gguf_name, interleaved, rows_of, spent_in_turn, table_of, write_gguf

ROOT = Path(__file__).parents[1]
HEADS, SIZE = 3, 8
SPEED = {
    "tokens_per_second": 123.4,
    "llama_cpp_tokens_per_second": 45.67,
    "ratio": 2.702,
    "spread": [2.5, 2.96],
    "read_bandwidth_gigabytes_per_second": 28.64,
}
SIDES = {"bits": 4, "llama_cpp_type": "q4_0", "activations": "int8"}
ROWS = {
    "decode": SIDES | SPEED | {"context": 1000},
    "prompt": SIDES | SPEED | {"prompt_tokens": 512},
}


def test_queries_meet_keys_in_llama_cpps_rotation_as_in_mlx_lms():
    """A product of rotated heads does not depend on the order of rows, if pairs on both sides rotate together."""
    inputs = normal(1, 5, 16, seed=1)

    def scores(arrange, traditional: bool) -> np.ndarray:
        queries, keys = (
            mx.fast.rope(
                (inputs @ mx.array(arrange(np.array(normal(HEADS * SIZE, 16, seed=seed)))).T)
                .reshape(1, 5, HEADS, SIZE)
                .swapaxes(1, 2),
                SIZE,
                traditional=traditional,
                base=10000.0,
                scale=1.0,
                offset=7,
            )
            for seed in (2, 3)
        )
        return np.array(queries @ keys.swapaxes(2, 3))

    ours = scores(lambda weight: weight, traditional=False)
    theirs = scores(lambda weight: interleaved(weight, HEADS), traditional=True)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-3)
    assert np.abs(scores(lambda weight: weight, traditional=True) - ours).max() > 0.1


def test_a_gguf_has_every_weight_of_the_model(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    model = tiny_model("llama")
    write_gguf(model, tmp_path / "m.gguf", "F32", context=99)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    heads = {"q_proj": model.args.num_attention_heads, "k_proj": model.args.num_key_value_heads}
    weights = weights_of(model)
    assert found.keys() == {gguf_name(path) for path in weights}
    for path, array in weights.items():
        weight = np.array(array)
        for name, count in heads.items():
            weight = interleaved(weight, count) if name in path else weight
        assert np.array_equal(found[gguf_name(path)], weight), path


def test_names_of_weights():
    assert gguf_name("model.layers.13.self_attn.k_proj.weight") == "blk.13.attn_k.weight"
    assert gguf_name("model.norm.weight") == "output_norm.weight"


def test_sides_are_timed_in_turn_and_compared_trial_by_trial():
    order = []

    def clock(name: str, seconds: list[float]):
        return lambda: (order.append(name), seconds.pop(0))[1]

    clocks = {"int8": clock("int8", [9, 1, 2, 4]), THEIRS: clock("theirs", [9, 3, 2, 2])}
    spent, bandwidth = spent_in_turn(clocks, 3, iter([7, 20, 30, 10]).__next__)
    assert order == ["int8", "theirs"] * 4
    assert spent == {"int8": [1, 2, 4], THEIRS: [3, 2, 2]}
    assert bandwidth == 20
    assert rows_of(spent, {"bits": 4}) == [
        {
            "bits": 4,
            "activations": "int8",
            "tokens_per_second": 0.5,
            "llama_cpp_tokens_per_second": 0.5,
            "ratio": 1,
            "spread": [0.5, 3],
        }
    ]


def test_tables_go_to_their_places_in_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- llama_cpp_{subject} -->\n<!-- end -->\n" for subject in LENGTHS))
    fill(page, {f"llama_cpp_{subject}": lambda s=subject: table_of(s, [ROWS[s]]) for subject in LENGTHS})
    cells = [line for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line][1::2]
    assert cells == [
        "| 1000 | 4 | q4_0 | int8 | 123 | 45.7 | 2.70 | 2.50-2.96 | 28.6 |",
        "| 512 | 4 | q4_0 | int8 | 123 | 45.7 | 2.70 | 2.50-2.96 | 28.6 |",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"shape": "1000x2"}, "--shape '1000x2': give a width that is a multiple of 256"),
        ({"contexts": [1, -2]}, "--contexts -2: is too few; give 0 or more"),
        ({"prompts": [512, 0]}, "--prompts 0: is too few; give 1 or more"),
        ({"trials": 0}, "--trials 0: is too few; give 1 or more"),
        ({"tokens": 0}, "--tokens 0: is too few"),
    ],
)
def test_a_wrong_flag_is_an_error(flags, said, monkeypatch):
    monkeypatch.setattr(llama_cpp, "versions", dict)
    with pytest.raises(GearbxError, match=said):
        llama_cpp.compare_llama_cpp(**flags)


@pytest.mark.processes
def test_a_missing_package_is_one_line(tmp_path):
    code = "import sys; sys.modules['llama_cpp'] = None; sys.argv = ['x', 'compare-llama-cpp', '--json', sys.argv[1]]\n"
    code += "from research.__main__ import main; main()"
    line = [sys.executable, "-c", code, str(tmp_path / "x.json")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not installed: pip install llama-cpp-python" in done.stderr
    assert not (tmp_path / "x.json").exists()
