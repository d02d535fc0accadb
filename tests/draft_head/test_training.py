"""Batches, steps, checkpoints and files of a head in training."""

import json
from itertools import chain, islice

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import tiny_model
from draft_heads import ROWS, random_answers, trainer_of

from gearbx_mlx import GearbxError
from gearbx_mlx.draft_head import training
from gearbx_mlx.draft_head.answers import Answer, divided
from gearbx_mlx.draft_head.run import predicted_speedup
from gearbx_mlx.draft_head.target import HeadTarget, recorded_layers
from gearbx_mlx.draft_head.training import AnswerBatch, frequent_tokens, save_head, stream, tokens_a_round


@pytest.fixture
def trainer(tiny, monkeypatch):
    monkeypatch.setattr(training, "BATCH_TOKENS", 200)
    return trainer_of(tiny)


@pytest.mark.parametrize("compiled", [False, True])
def test_batch_names_the_tokens_to_draft(compiled):
    answers = [Answer(0, [5, 6, 7, 8, 9, 10], 2, 0.0), Answer(1, [1, 2, 3, 4], 1, 0.0)]
    batch = AnswerBatch.of(answers, compiled)
    width = batch.tokens.shape[1] - 3
    counted = np.array(batch.weights) > 0
    drafts = [[*batch.drafts[place][counted[place]]] for place in range(3)]
    assert drafts == [[8, 9, 10, 3, 4], [9, 10, 4], [10]]
    row, column = divmod(np.array(batch.at)[counted[0]], width)
    assert [*np.array(batch.tokens)[row, column]] == [6, 7, 8, 1, 2]


def test_stream_has_each_answer_once_an_epoch():
    answers = random_answers(30, 50)
    first, again = ([*chain(*islice(stream(answers), 200))] for _ in range(2))
    assert first == again
    assert sorted(each.number for each in first[:30]) == [*range(30)]


def test_steps_reduce_the_loss(trainer):
    losses = [trainer.train_step(0.0) for _ in range(25)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.03  # of random answers little can be learned


def test_compiled_steps_equal_others(tiny, trainer, monkeypatch):
    expected = [trainer.train_step(0.5) for _ in range(3)]
    monkeypatch.setattr(training, "uses_blas", lambda: False)
    monkeypatch.setattr("gearbx_mlx.draft_head.blas.uses_blas", lambda: False)
    compiled = trainer_of(tiny)
    assert compiled.compiled
    assert [compiled.train_step(0.5) for _ in range(3)] == pytest.approx(expected, rel=1e-3)


def test_resumed_training_equals_uninterrupted(tiny, trainer, tmp_path):
    for _ in range(3):
        trainer.train_step(0.3)
    trainer.save(tmp_path / "state")
    resumed = trainer_of(tiny)
    resumed.resume(tmp_path / "state")
    for each in (trainer, resumed):
        for _ in range(3):
            each.train_step(0.7)
    assert (resumed.step, resumed.seen) == (trainer.step, trainer.seen) == (6, trainer.seen)
    for name, array in trainer.weights.items():  # numpy rounds sums by the place of an array in memory
        np.testing.assert_allclose(resumed.weights[name], array, atol=1e-6)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      "])
def test_damaged_checkpoint_is_one_error(trainer, tmp_path, damage):
    (tmp_path / "state").write_bytes(damage)
    with pytest.raises(GearbxError, match="not a checkpoint of this head"):
        trainer.resume(tmp_path / "state")


@pytest.mark.parametrize("bits", [None, 4])
def test_saved_head_has_the_released_format(trainer, tmp_path, bits):
    save_head(tmp_path, trainer, {"max_position_embeddings": 99}, bits)
    config = json.loads((tmp_path / "config.json").read_text())
    arrays = mx.load(str(tmp_path / "model.safetensors"))
    layer, size = config["transformer_layer_config"], trainer.shape.hidden_size
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == ROWS
    assert (layer["hidden_size"], layer["max_position_embeddings"]) == (size, 99)
    assert config["eagle_aux_hidden_state_layer_ids"] == [*trainer.target.layers]
    assert ("quantization" in config) == (bits is not None)
    names = {f"{name}.weight" for name in (*trainer.shape.matrices(), *trainer.shape.norms, "lm_head")}
    assert {*arrays} - {name for name in arrays if name.endswith(("scales", "biases"))} == names | {"d2t", "t2d"}
    assert np.array_equal(np.array(arrays["d2t"]) + np.arange(ROWS), trainer.tokens)
    assert np.array_equal(np.flatnonzero(np.array(arrays["t2d"])), trainer.tokens)


def test_saved_head_reads_states_of_the_model(trainer, tmp_path):
    """The scale of training is part of the saved matrix."""
    save_head(tmp_path, trainer, {})
    states, _ = trainer.target.states(mx.array([[1, 2, 3]]))
    saved = mx.load(str(tmp_path / "model.safetensors"))["fc.weight"].astype(mx.float32)
    ours = states @ trainer.weights["fc.weight"].T
    assert mx.allclose((states * trainer.target.scale) @ saved.T, ours, atol=0.05 * float(mx.abs(ours).max())).item()


def test_test_counts_drafts_after_right_ones(trainer):
    """A head that always drafts one token is right where this token follows, and never twice in a row."""
    token = int(trainer.tokens[0])
    trainer.rows = mx.zeros_like(trainer.rows)
    tokens = [token if index % 3 == 0 else int(trainer.tokens[1]) for index in range(33)]
    trainer.held = [Answer(0, tokens, 4, 0.0)]
    assert trainer.test() == [pytest.approx(9 / 28), 0.0, 0.0]


def test_rows_are_the_most_frequent_tokens_of_answers():
    answers = [Answer(0, [9, 9, 9, 4, 4, 7], 1, 0.0), Answer(1, [2, 2, 7, 7, 7], 2, 0.0)]
    assert [*frequent_tokens(answers, 3, 12)] == [4, 7, 9]
    assert [*frequent_tokens(answers, 5, 12)] == [0, 1, 4, 7, 9]


def test_held_out_answers_are_never_trained_on():
    train, held = divided(random_answers(60, 50))
    assert [each.number for each in held] == [0, 24, 48]
    assert len(train) == 57
    with pytest.raises(GearbxError, match="too few answers"):
        divided(random_answers(1, 50))


@pytest.mark.parametrize(("layers", "expected"), [(30, (2, 15, 27)), (6, (2, 4, 6)), (2, (1, 1, 2)), (8, (2, 4, 5))])
def test_recorded_layers_follow_the_release(layers, expected):
    assert recorded_layers(layers) == expected


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("quantized", [False, True])
def test_rows_and_steps_of_models_like_llama(architecture, quantized):
    model = tiny_model(architecture)
    table = model.lm_head.weight if "lm_head" in model else model.model.embed_tokens.weight
    if quantized:
        nn.quantize(model, 32, 8)
    trainer = trainer_of(model)
    assert mx.allclose(trainer.rows, table[mx.array(trainer.tokens)], atol=2e-3).item()
    assert np.isfinite(trainer.train_step(0.5))


def test_model_unlike_a_llama_is_one_error():
    with pytest.raises(GearbxError, match="is not like a Llama"):
        HeadTarget(tiny_model("gpt_neox"), "other")


def test_speed_is_predicted_from_places_and_costs():
    assert tokens_a_round([0.5, 0.5, 0.0]) == 1.75
    assert predicted_speedup([0.5, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], 0.0) == 1.75
    assert predicted_speedup([0.5, 0.5, 0.0], [1.0, 1.5, 2.0, 2.5], 0.1) == 1.0
