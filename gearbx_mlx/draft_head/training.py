"""Training of a draft head on the model's answers: batches, steps, a test on held-out answers, and files.

A checkpoint has the state of training. A finished head has the EAGLE-3 format of speculators, which mlx-vlm and vLLM
read.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from ..errors import GearbxError, one_line
from ..files.writing import replacing_arrays, write_text
from .answers import Answer
from .blas import uses_blas
from .layer import PLACES, HeadShape, initial_weights, linear, loss_of, unrolled
from .target import HeadTarget, scale_of

LEARNING_RATE = 2e-3
WARM_UP = 30  # steps
BATCH_TOKENS = 1200  # tokens of answers in a step
GRADIENT_NORM = 1.0
GROUP_SIZE = 64  # weights per scale of a finished head, if quantized
COMPILED_LENGTH, COMPILED_ROWS = 64, 256  # compiled steps have multiples of these, so that few are compiled
KEPT, USES = (
    4,
    2,
)  # batches whose hidden states are kept, and steps with each of them: the model's pass is half of a step
LONGER = (0.4, 0.65)  # shares of the time after which a second and a third place are trained


@dataclass(frozen=True)
class AnswerBatch:
    """Answers as arrays.

    Attributes:
        tokens: (B, L) padded at the end.
        at: (M,) indices into B x (L - PLACES) of draft positions in answers.
        weights: (PLACES, M) 1 if a draft of so many tokens begins there, float32.
        answers: (PLACES, M) the token to draft there.
    """

    tokens: mx.array
    at: mx.array
    weights: mx.array
    drafts: np.ndarray

    @classmethod
    def of(cls, answers: Sequence[Answer], compiled: bool = False) -> "AnswerBatch":
        length = max(len(each.tokens) for each in answers) + PLACES - 1
        length += -length % COMPILED_LENGTH if compiled else 0
        tokens = np.zeros((len(answers), length + PLACES), np.int32)
        last = np.array([len(each.tokens) for each in answers])
        for number, each in enumerate(answers):
            tokens[number, : len(each.tokens)] = each.tokens
        width = length - PLACES
        # After token u the head drafts token u + 2: in answers, from the one after their first token.
        at = np.concatenate(
            [n * width + np.arange(each.start - 1, len(each.tokens) - 2) for n, each in enumerate(answers)]
        )
        row, column = np.divmod(at, width)
        weights = np.stack([column + place + 2 < last[row] for place in range(PLACES)]).astype(np.float32)
        drafts = np.stack([tokens[row, column + place + 2] for place in range(PLACES)])
        padding = -len(at) % COMPILED_ROWS if compiled else 0
        weights, drafts = (np.pad(each, ((0, 0), (0, padding))) for each in (weights, drafts))
        return cls(mx.array(tokens[:, :length]), mx.array(np.pad(at, (0, padding))), mx.array(weights), drafts)


def groups(answers: Sequence[Answer], tokens: int = BATCH_TOKENS) -> list[list[Answer]]:
    """Divide answers, in order, into groups of about `tokens` tokens."""
    found: list[list[Answer]] = [[]]
    for each in answers:
        longest = max((len(other.tokens) for other in [*found[-1], each]), default=0)
        if found[-1] and longest * (len(found[-1]) + 1) > 1.6 * tokens:  # with prompts and padding
            found.append([])
        found[-1].append(each)
    return found


def stream(answers: Sequence[Answer], seed: int = 0) -> Iterator[list[Answer]]:
    """Yield groups of answers of similar length without end, the same in every run."""
    epoch = 0
    while True:
        random = np.random.default_rng((seed, epoch))
        shuffled = [answers[number] for number in random.permutation(len(answers))]
        made = groups(sorted(shuffled, key=lambda each: len(each.tokens) // 40))
        yield from (made[number] for number in random.permutation(len(made)))
        epoch += 1


def rate_at(step: int, progress: float) -> float:
    """Return the learning rate: a warm-up, then half a cosine. progress: 0 to 1."""
    return LEARNING_RATE * min(1, (step + 1) / WARM_UP) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * progress))


def places_at(progress: float) -> int:
    """Return how many draft positions are trained: more as the head learns."""
    return 1 + sum(progress >= start for start in LONGER)


@dataclass
class Trainer:
    """A head in training.

    Args:
        target: the frozen model. Its scale is set here.
        tokens: (V,) the tokens of the head's output rows, ascending.
        answers: to train on.
        held: to test on.

    Attributes:
        step, seconds, seen: steps, their time and the tokens of answers in them.
        best: highest number of tokens per round in a test.
    """

    target: HeadTarget
    shape: HeadShape
    tokens: np.ndarray
    answers: Sequence[Answer]
    held: Sequence[Answer]
    step: int = 0
    seconds: float = 0.0
    seen: int = 0
    best: float = 0.0
    weights: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.compiled = not uses_blas()
        self.rows = self.target.output.rows(mx.array(self.tokens))
        self.optimizer = optim.AdamW(LEARNING_RATE, betas=[0.9, 0.95], weight_decay=0.0, bias_correction=True)
        self.target.scale = mx.ones_like(self.target.scale)
        self.target.scale = scale_of(self.target.states(AnswerBatch.of(groups(self.answers)[0]).tokens)[0])
        last = self.target.scale[-self.shape.hidden_size :]
        norm = self.target.norm * last / mx.sqrt(mx.square(last).mean())  # its inputs are scaled states
        self.weights = initial_weights(self.shape, norm)
        self.optimizer.init(self.weights)
        mx.eval(self.rows, self.target.scale, self.weights)
        self._stream, self._round = stream(self.answers), -1
        update: Any = self._update
        if self.compiled:
            state = [self.weights, self.optimizer.state]
            update = mx.compile(update, inputs=state, outputs=state)
        self._compiled_update = update

    def train_step(self, progress: float) -> float:
        """Train on the next batch, and return its loss in nats. progress: 0 to 1, for the schedule."""
        batch, states, embedded, after = self._next_inputs()
        self.optimizer.learning_rate = rate_at(self.step, progress)
        inputs = states, embedded, after, batch.at, batch.weights
        loss = self._compiled_update(*inputs, places_at(progress))
        mx.eval(loss, self.weights, self.optimizer.state)
        self.step, self.seen = self.step + 1, self.seen + int(batch.weights[0].sum())
        return float(loss)

    def _next_inputs(self) -> tuple[AnswerBatch, mx.array, mx.array, mx.array]:
        """Return a batch with its hidden states (B, T, 3D), embeddings, and the states after its draft positions."""
        current, place = divmod(self.step, KEPT * USES)
        if current != self._round:
            self._round, self._kept = current, dict[int, tuple[AnswerBatch, mx.array, mx.array, mx.array]]()
            self._groups = [next(self._stream) for _ in range(KEPT)]
        number = place % KEPT
        if number not in self._kept:
            batch = AnswerBatch.of(self._groups[number], self.compiled)
            states, last = self.target.states(batch.tokens)
            width = batch.tokens.shape[1] - PLACES
            after = last[:, 1 : width + 1].reshape(-1, last.shape[-1])[batch.at]
            self._kept[number] = batch, states[:, :width], self.target.embedding.rows(batch.tokens[:, 1:]), after
            mx.eval(self._kept[number][1:])
        return self._kept[number]

    def _update(
        self, states: mx.array, embedded: mx.array, after: mx.array, at: mx.array, weights: mx.array, places: int
    ) -> mx.array:
        def loss(own: dict[str, Any]) -> mx.array:
            outputs = unrolled(own, self.shape, states, embedded, places)
            return loss_of(outputs, self.rows, after, at, weights)

        found, gradients = mx.value_and_grad(loss)(self.weights)
        gradients, _ = optim.clip_grad_norm(gradients, GRADIENT_NORM)
        self.weights.update(self.optimizer.apply_gradients(gradients, self.weights))
        return found

    def test(self) -> list[float]:
        """Return, for each place, the share of correct tokens in held-out answers, if earlier places are correct."""
        drafted, right = np.zeros(PLACES), np.zeros(PLACES)
        tokens = mx.array(self.tokens)
        for group in groups(self.held):
            batch = AnswerBatch.of(group)
            width = batch.tokens.shape[1] - PLACES
            states, _ = self.target.states(batch.tokens)
            embedded = self.target.embedding.rows(batch.tokens[:, 1:])
            alive = np.ones(batch.drafts.shape[1], bool)
            for place, output in enumerate(unrolled(self.weights, self.shape, states[:, :width], embedded, PLACES)):
                chosen = linear(output.reshape(-1, output.shape[-1])[batch.at], self.rows).argmax(-1)
                alive &= np.array(batch.weights[place]) > 0
                drafted[place] += alive.sum()
                alive &= np.array(tokens[chosen]) == batch.drafts[place]
                right[place] += alive.sum()
        return [float(share) for share in right / np.maximum(drafted, 1)]

    def save(self, file: Path) -> None:
        """Write a checkpoint. Raises GearbxError if that fails; the previous one then stays."""
        arrays = {f"weights {name}": array for name, array in self.weights.items()}
        for name, value in self.optimizer.state.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            arrays |= {f"optimizer {name} {part}": array for part, array in parts}
        arrays["scale"] = self.target.scale
        numbers = {name: repr(getattr(self, name)) for name in ("step", "seconds", "seen", "best")}
        with replacing_arrays(file) as place:
            mx.save_safetensors(place, arrays, numbers)

    def resume(self, file: Path) -> None:
        """Continue from a checkpoint. Raises GearbxError for one that cannot be read or is of a different shape."""
        try:
            loaded: Any = mx.load(str(file), format="safetensors", return_metadata=True)
            arrays, numbers = loaded
            for name, array in self.weights.items():
                if arrays[f"weights {name}"].shape != array.shape:
                    raise ValueError(f"{name} has a different shape")
            self.weights.update({name: arrays[f"weights {name}"] for name in self.weights})
            for name, value in self.optimizer.state.items():
                if isinstance(value, dict):
                    value.update({part: arrays[f"optimizer {name} {part}"] for part in value})
                else:
                    self.optimizer.state[name] = arrays[f"optimizer {name} "]
            self.target.scale = arrays["scale"]
            self.step, self.seen = int(numbers["step"]), int(numbers["seen"])
            self.seconds, self.best = float(numbers["seconds"]), float(numbers["best"])
            mx.eval(self.weights, self.optimizer.state, self.target.scale)
        except (RuntimeError, ValueError, KeyError) as error:
            raise GearbxError(
                f"{file}: not a checkpoint of this head ({one_line(error)}); remove it to start again"
            ) from error
        for _ in range(self.step // (KEPT * USES) * KEPT):
            next(self._stream)


def tokens_a_round(places: Sequence[float]) -> float:
    """Return the mean number of tokens of a round that drafts as many tokens as there are places."""
    return 1 + sum(accumulate(places, mul))


def frequent_tokens(answers: Sequence[Answer], most: int, vocabulary: int) -> np.ndarray:
    """Return the most frequent tokens of answers, ascending; of equally frequent ones the lowest."""
    counts = np.zeros(vocabulary, int)
    for each in answers:
        np.add.at(counts, each.tokens[each.start :], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:most])


def head_config(trainer: Trainer, model: dict[str, Any], bits: int | None) -> dict[str, Any]:
    """Return config.json of a head. model: the configuration of its model. bits: of quantized weights."""
    shape = trainer.shape
    layer = {
        **{name: value for name, value in vars(shape).items() if name != "draft_vocab_size"},
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": model.get("max_position_embeddings", 2048),
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    quantization = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": PLACES}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(trainer.target.layers),
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": model.get("architectures", []), "name_or_path": None},
        },
        **({"quantization": quantization} if bits else {}),
    }


def head_arrays(trainer: Trainer, bits: int | None, embeddings: bool) -> dict[str, mx.array]:
    """Return the arrays of a head; matrices are bfloat16, or have this many bits if their width allows."""
    arrays = dict(trainer.weights)
    if embeddings:
        arrays["embed_tokens.weight"] = trainer.target.embedding.rows(mx.arange(trainer.shape.vocab_size))
    arrays["fc.weight"] = arrays["fc.weight"] / trainer.target.scale  # so that it takes unscaled states
    arrays["lm_head.weight"] = trainer.rows
    found: dict[str, mx.array] = {}
    for name, array in arrays.items():
        path = name.removesuffix(".weight")
        if bits and array.ndim == 2 and array.shape[1] % GROUP_SIZE == 0:
            parts = mx.quantize(array.astype(mx.bfloat16), GROUP_SIZE, bits)
            found |= {f"{path}.{part}": each for part, each in zip(("weight", "scales", "biases"), parts)}
        else:
            found[name] = array.astype(mx.bfloat16)
    offsets = trainer.tokens - np.arange(len(trainer.tokens))
    found["d2t"] = mx.array(offsets.astype(np.int64))
    found["t2d"] = mx.array(np.isin(np.arange(trainer.shape.vocab_size), trainer.tokens))
    return found


def save_head(
    directory: Path, trainer: Trainer, model: dict[str, Any], bits: int | None = None, embeddings: bool = False
) -> None:
    """Write a head. Each file of an earlier head is replaced as a whole.

    Args:
        model: the configuration of the head's model.
        bits: of quantized matrices, which only MLX reads; None: bfloat16.
        embeddings: write a copy of the model's embeddings too.

    Raises:
        GearbxError: a file that cannot be written.
    """
    with replacing_arrays(directory / "model.safetensors") as place:
        mx.save_safetensors(place, head_arrays(trainer, bits, embeddings), {"format": "mlx"})
    write_text(directory / "config.json", json.dumps(head_config(trainer, model, bits), indent=2) + "\n")
