"""Decoding and prompts of one random Llama: our gears beside llama.cpp's types."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from gearbx_mlx.benchmark.decode import PROMPT, decode_seconds, random_llama
from gearbx_mlx.benchmark.measuring import timed
from gearbx_mlx.gears.gearbox import Gearbox

from .gguf_file import TYPES, write_gguf
from .peer import favourite, follow, open_model, read_again
from .rounds import DENSE, THEIRS, Clock, Rounds, rows_of

GEARS = ",".join(map(str, TYPES))
PROMPT_TOKENS = 512
STEP = 256  # tokens, to which llama.cpp rounds the room for a context

Rows = list[dict[str, Any]]


class RandomModels:
    """The same random Llama for both sides: a gearbox for each kind of activations, and each type of llama.cpp."""

    def __init__(self, args: Namespace, folder: Path, threads: int) -> None:
        room = max(args.contexts) + max(args.tokens, PROMPT_TOKENS) + len(PROMPT)
        room = -(-room // STEP) * STEP
        self.gearboxes = {
            name: Gearbox(random_llama(args.shape), GEARS, kernels="native", activations=name)
            for name in args.activations
        }
        self.peers, self.bytes = {}, {}
        model = random_llama(args.shape)
        self.vocabulary = model.args.vocab_size
        for bits, kind in TYPES.items():
            file = folder / f"{kind}.gguf"
            write_gguf(model, file, kind, room)
            self.bytes[bits] = file.stat().st_size
            self.peers[bits] = open_model(file, room, threads)
            file.unlink()

    def tokens(self, count: int) -> list[int]:
        return np.random.default_rng(0).integers(self.vocabulary, size=count).tolist()

    def compare(
        self, bits: int, rounds: Rounds, what: str, ours: Callable[[Any], float], theirs: Clock, shared: dict[str, Any]
    ) -> Rows:
        """Time the gear of some bits of each gearbox, and llama.cpp's type of as many.

        Args:
            ours: seconds per token of a model.
        """
        gearboxes = self.gearboxes if bits < 16 else {DENSE: next(iter(self.gearboxes.values()))}
        clocks: dict[str, Clock] = {}
        for name, gearbox in gearboxes.items():
            gearbox.shift(bits)
            clocks[name] = lambda model=gearbox.model: ours(model)
        spent, bandwidth = rounds.time(f"{what}, {bits} bits", clocks | {THEIRS: theirs})
        read = gearbox.weight_bytes_per_token(gearbox.gear)
        return rows_of(
            spent,
            {
                "bits": bits,
                "llama_cpp_type": TYPES[bits].lower(),
                "weight_bytes_per_token": read,
                "llama_cpp_file_bytes": self.bytes[bits],
                "read_bandwidth_gigabytes_per_second": bandwidth,
            }
            | shared,
        )


def decode_rows(models: RandomModels, rounds: Rounds, args: Namespace) -> Rows:
    """Greedy tokens after each context. Our keys and values of a context are random: how long they take is the same."""
    rows: Rows = []
    text, kept = models.tokens(max(args.contexts) + len(PROMPT)), 0
    for context in sorted(args.contexts):
        read = text[: context + len(PROMPT)]  # decode_seconds puts its prompt after the context
        ours = partial(decode_seconds, tokens=args.tokens, context=context)
        for bits, peer in models.peers.items():
            read_again(peer, read[kept:], kept)
            theirs = partial(decoding_seconds, peer, read, args.tokens)
            rows += models.compare(bits, rounds, f"context {context}", ours, theirs, {"context": context})
        kept = len(read)
    return rows


def decoding_seconds(peer: Any, read: list[int], tokens: int) -> float:
    """Seconds per token of llama.cpp, after tokens that its KV cache begins with."""
    read_again(peer, read[-1:], len(read) - 1)
    return timed(lambda: [*islice(follow(peer), tokens + 1)]) / tokens  # the first one is known already


def prompt_rows(models: RandomModels, rounds: Rounds) -> Rows:
    """A prompt up to the first token of its answer, in seconds per token of the prompt."""
    prompt = models.tokens(PROMPT_TOKENS)
    ours = partial(first_token_seconds, prompt=prompt)
    rows: Rows = []
    for bits, peer in models.peers.items():

        def theirs(peer: Any = peer) -> float:
            return timed(lambda: (read_again(peer, prompt), favourite(peer))) / PROMPT_TOKENS

        rows += models.compare(bits, rounds, "prompt", ours, theirs, {"prompt_tokens": PROMPT_TOKENS})
    return rows


def first_token_seconds(model: Any, prompt: list[int]) -> float:
    """Seconds per token of the prompt, until mlx-lm hands out the first token after it."""
    steps = generate_step(mx.array(prompt), model, max_tokens=1)
    return timed(lambda: next(steps)) / len(prompt)
