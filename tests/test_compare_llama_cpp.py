"""The study compare-llama-cpp, as far as llama.cpp need not be installed, and that both sides write the same texts."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal, tiny_model, weights_of
from pages import fill

from gearbx_mlx import GearbxError
from research import llama_cpp
from research.llama_cpp import COLUMNS, THEIRS, Drafter, Rounds, gguf_name, interleaved, rows_of, table_of, write_gguf

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
TEXTS = {"speedup": 1.5, "llama_cpp_speedup": 1.25, "identical": 4, "llama_cpp_identical": 3, "prompts": 4}
ROWS = {
    "decode": SIDES | SPEED | {"context": 1000},
    "prompt": SIDES | SPEED | {"prompt_tokens": 512},
    "lossless": SPEED | TEXTS | {"activations": "int8", "llama_cpp_draft_tokens": 3},
}


def test_queries_meet_keys_in_llama_cpps_rotation_as_in_mlx_lms():
    """A product of rotated heads does not depend on the order of rows, if pairs are rotated together on both sides."""
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


class Automaton:
    """What a Drafter uses of a llama_cpp.Llama; its next token depends on all that are in its cache."""

    def __init__(self) -> None:
        self.cache: list[int] = []
        self.n_tokens = self.computed = 0

    def eval(self, tokens: list[int]) -> None:
        assert self.n_tokens <= len(self.cache)
        self.cache = self.cache[: self.n_tokens] + list(tokens)
        self.n_tokens, self.computed = len(self.cache), self.computed + len(tokens)

    def follow(self):
        while True:
            token = sum(place * token for place, token in enumerate(self.cache, 1)) % 97
            yield token
            self.eval([token])


def test_drafts_go_on_from_what_the_cache_keeps():
    model = Automaton()
    drafter = Drafter(model, 4, Automaton.follow)
    text = [5, 6, 7]
    expected = Drafter(Automaton(), 4, Automaton.follow)(np.array(text)).tolist()
    for accepted, then in ((4, 11), (2, 96), (0, 1)):  # of a draft, and the token that is written after them
        drafted = drafter(np.array(text)).tolist()
        assert drafted == expected
        text = text + drafted[:accepted] + [then]
        expected = Drafter(Automaton(), 4, Automaton.follow)(np.array(text)).tolist()
    # 3 of the prompt; then each time the tokens that the cache lacks; three of a draft's four are computed.
    assert model.computed == (3 + 3) + (2 + 3) + (1 + 3)


def test_a_draft_after_the_same_text_is_the_same():
    drafter = Drafter(Automaton(), 3, Automaton.follow)
    assert drafter(np.array([5, 6])).tolist() == drafter(np.array([5, 6])).tolist()


def test_sides_are_timed_in_turn_and_compared_trial_by_trial():
    order = []

    def clock(name: str, seconds: list[float]):
        return lambda: (order.append(name), seconds.pop(0))[1]

    progress = SimpleNamespace(track=lambda trials, description: trials)
    clocks = {"int8": clock("int8", [9, 1, 2, 4]), THEIRS: clock("theirs", [9, 3, 2, 2])}
    spent, bandwidth = Rounds(3, iter([7, 20, 30, 10]).__next__, progress).time("", clocks)
    assert order == ["int8", "theirs"] * 4
    assert spent == {"int8": [1, 2, 4], THEIRS: [3, 2, 2]}
    assert bandwidth == 15
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
    page.write_text("".join(f"<!-- llama_cpp_{subject} -->\n<!-- end -->\n" for subject in COLUMNS))
    fill(page, {f"llama_cpp_{subject}": lambda s=subject: table_of(s, [ROWS[s]]) for subject in COLUMNS})
    cells = [line for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line][1::2]
    assert cells == [
        "| 1000 | 4 | q4_0 | int8 | 123 | 45.7 | 2.70 | 2.50-2.96 | 28.6 |",
        "| 512 | 4 | q4_0 | int8 | 123 | 45.7 | 2.70 | 2.50-2.96 | 28.6 |",
        "| int8 | 3 | 123 | 45.7 | 2.70 | 2.50-2.96 | 1.50 | 1.25 | 4 of 4 | 3 of 4 |",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"shape": "1000x2"}, "--shape '1000x2': give a width that is a multiple of 256"),
        ({"contexts": [1, -2]}, "--contexts -2: is too few; give 0 or more"),
        ({"trials": 0}, "--trials 0: is too few; give 1 or more"),
        ({"tokens": 0}, "--tokens 0: is too few"),
    ],
)
def test_a_wrong_flag_is_an_error(flags, said, monkeypatch):
    monkeypatch.setattr(llama_cpp, "versions", dict)
    with pytest.raises(GearbxError, match=said):
        llama_cpp.compare_llama_cpp(**flags)


def test_a_missing_package_is_one_line(tmp_path):
    code = "import sys; sys.modules['llama_cpp'] = None; sys.argv = ['x', 'compare-llama-cpp', '--json', sys.argv[1]]\n"
    code += "from research.__main__ import main; main()"
    line = [sys.executable, "-c", code, str(tmp_path / "x.json")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not installed: pip install llama-cpp-python gguf" in done.stderr
    assert not (tmp_path / "x.json").exists()


@pytest.fixture
def drafting():
    for package in ("llama_cpp", "gguf"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return llama_cpp


def test_llama_cpp_writes_the_demo_models_texts(drafting, demo, tmp_path, monkeypatch):
    monkeypatch.setattr(drafting, "CHECKED", 10)
    prompts = [demo.tokenizer.encode(text) for text in ("Question: Tom has 5 apples.", "Once upon a time")]
    drafting.check_texts(demo.tokenizer, prompts, tmp_path, 1)
    monkeypatch.setattr(llama_cpp, "interleaved", lambda weight, heads: weight)
    with pytest.raises(GearbxError, match="prompt 1: in float32"):
        drafting.check_texts(demo.tokenizer, prompts, tmp_path, 1)


def test_drafts_change_no_text_on_either_side(drafting, tmp_path):
    progress = SimpleNamespace(track=lambda trials, description: trials)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tom has 5 apples and buys 7 more. How many has he?\n")
    args = Namespace(
        prompts=prompts, num_prompts=1, max_tokens=12, draft_lengths=[3], activations=["int8"], times=1, trials=1
    )
    rows = drafting.lossless_rows(Rounds(1, lambda: 1.0, progress), args, tmp_path, 1)
    assert [(row["activations"], row["llama_cpp_draft_tokens"]) for row in rows] == [("float", 0), ("int8", 3)]
    for row in rows:
        assert row["identical"] == row["llama_cpp_identical"] == row["llama_cpp_as_ours"] == 1
        assert row["tokens_per_second"] > 0 < row["llama_cpp_tokens_per_second"]
