"""The unrolled training pass, against a head that drafts token by token."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal

from gearbx_mlx.draft_head import blas
from gearbx_mlx.draft_head.layer import PLACES, HeadShape, initial_weights, loss_of, unrolled

SHAPE = HeadShape(32, 48, 4, 2, 8, 64, 20, 1e-5, 10000.0)
TOKENS = 9


@pytest.fixture
def weights():
    made = initial_weights(SHAPE, normal(32, seed=1))
    return {name: array + normal(*array.shape, seed=2, scale=0.05) for name, array in made.items()}


@pytest.fixture
def states():
    return normal(2, TOKENS, 96, seed=3)


@pytest.fixture
def embedded():
    return normal(2, TOKENS + PLACES - 1, 32, seed=4)


def close(a: mx.array, b: mx.array) -> bool:
    return mx.allclose(a, b, rtol=1e-4, atol=1e-4).item()


def test_later_place_reads_only_tokens_before_it(weights, states, embedded):
    """Place 3 of the draft at token 4 reads states up to 4, and embeddings up to 4 + 2."""
    before = unrolled(weights, SHAPE, states, embedded, PLACES)[2][:, 4]
    later_states = mx.concatenate([states[:, :5], 1 + states[:, 5:]], axis=1)
    later_tokens = mx.concatenate([embedded[:, :7], 1 + embedded[:, 7:]], axis=1)
    assert close(unrolled(weights, SHAPE, later_states, later_tokens, PLACES)[2][:, 4], before)
    earlier = mx.concatenate([embedded[:, :6], 1 + embedded[:, 6:]], axis=1)
    assert not close(unrolled(weights, SHAPE, states, earlier, PLACES)[2][:, 4], before)


def test_first_place_is_the_same_with_more_places(weights, states, embedded):
    one, three = (unrolled(weights, SHAPE, states, embedded, places) for places in (1, PLACES))
    assert len(three) == PLACES
    assert close(one[0], three[0])


@pytest.mark.parametrize("block", [2, 64])
def test_numpy_gives_mlx_loss_and_gradients(weights, states, embedded, monkeypatch, block):
    monkeypatch.setattr(blas, "BLOCK", block)
    rows, after = normal(20, 32, seed=5), normal(6, 32, seed=6)
    at, counted = mx.array([0, 1, 2, 9, 10, 11]), mx.array([[1.0] * 6, [1.0] * 5 + [0.0], [1.0] * 4 + [0.0] * 2])

    def loss(own):
        return loss_of(unrolled(own, SHAPE, states, embedded, PLACES), rows, after, at, counted)

    found = []
    for numpy in (True, False):
        monkeypatch.setattr(blas, "uses_blas", lambda numpy=numpy: numpy)
        found.append(mx.value_and_grad(loss)(weights))
    (a, ours), (b, mlx) = found
    assert close(a, b)
    assert all(close(ours[name], mlx[name]) for name in ours)


@pytest.mark.parametrize("rows", [2, 3, 600])
def test_threads_share_rows_of_large_matrices(rows):
    a, b = (
        np.random.default_rng(seed).normal(size=size).astype(np.float32)
        for seed, size in enumerate([(rows, 256), (256, 512)])
    )
    np.testing.assert_allclose(blas.shared(a, b), a.astype(float) @ b, atol=1e-4)


def test_loss_ignores_positions_without_weight(weights, states, embedded):
    outputs = unrolled(weights, SHAPE, states, embedded, 1)
    rows, after = normal(20, 32, seed=5), normal(2, 32, seed=6)
    both = loss_of(outputs, rows, after, mx.array([3, 5]), mx.array([[1.0, 0.0]]))
    assert close(both, loss_of(outputs, rows, after[:1], mx.array([3]), mx.ones((1, 1))))
    q, p = mx.softmax(outputs[0].reshape(-1, 32)[3] @ rows.T), mx.softmax(after[0] @ rows.T)
    assert close(both, -(p * mx.log(q)).sum())


def test_saved_head_drafts_as_mlx_vlm_does(tmp_path, tiny):
    """Logits of all places, drafted token by token by mlx-vlm's class from its own states."""
    vlm = pytest.importorskip("mlx_vlm.speculative.drafters", reason="MLX-VLM WAS NOT COMPARED: pip install '.[vlm]'")
    from draft_heads import trainer_of

    from gearbx_mlx.draft_head.training import save_head

    trainer = trainer_of(tiny)
    trainer.weights = {name: each + normal(*each.shape, seed=7, scale=0.05) for name, each in trainer.weights.items()}
    save_head(tmp_path, trainer, {}, embeddings=True)
    drafter, kind = vlm.load_drafter(str(tmp_path))
    assert kind == "eagle3"
    assert [number + 1 for number in drafter.config.capture_layer_ids] == [*trainer.target.layers]

    tokens = mx.array([trainer.answers[0].tokens[:12]])
    states, _ = trainer.target.states(tokens)
    embedded = trainer.target.embedding.rows(tokens[:, 1:])
    outputs = unrolled(trainer.weights, trainer.shape, states[:, :8], embedded, PLACES)
    drafter.set_dtype(mx.float32)
    drafter.reset(tiny)
    drafter.embed_tokens.weight = trainer.target.embedding.rows(mx.arange(trainer.shape.vocab_size))
    raw = (states * trainer.target.scale)[:, :8]
    hidden = drafter._forward_tokens(tokens[:, 1:9], raw, mx.int32)[:, -1:]
    for place, output in enumerate(outputs):
        logits, ours = drafter._logits(hidden)[0, -1], trainer.rows @ output[0, -1]
        np.testing.assert_allclose(logits, ours, rtol=0.05, atol=0.05 * float(mx.abs(ours).max()))  # saved in bfloat16
        row = int(mx.argmax(logits))
        assert row + int(drafter.d2t[row]) == trainer.tokens[row]
        hidden = drafter._forward_tokens(tokens[:, 9 + place : 10 + place], hidden, mx.int32)
