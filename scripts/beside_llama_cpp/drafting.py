"""Mode lossless beside llama.cpp's speculative decoding, on real texts by a large model.

Both sides draft with 4 bits of the model that verifies: we with its low gear, llama.cpp with a second model, in q4_0.
The model is the demo model widened, as in time_lossless.py.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx_lm
from measure_lossless import encode
from time_lossless import widened

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.decoding.draft_plans import SHIPPED, read_draft_file
from gearbx_mlx.errors import GearbxError

from .gguf_file import TYPES, write_gguf
from .peer import Drafter, generated, open_model
from .rounds import DENSE, THEIRS, Rounds, compared, gain

CURVE = SHIPPED / "4-8-16.json"
CONTEXT = 2048  # tokens of the longest prompt and its text
CHECKED = 40  # tokens of a text in float32
OURS, ALONE = "ours ", " alone"  # in the names of writers

Text = list[int]
Writer = Callable[[Text], Iterator[int]]  # the tokens after a prompt


class Texts:
    """Times the texts after all prompts by one writer, and keeps them."""

    def __init__(self, write: Writer, prompts: list[Text]) -> None:
        self.write, self.prompts = write, prompts
        self.made: list[Text] = []

    def __call__(self) -> float:
        """Seconds per token after the first one of each text."""
        self.made, seconds = [], 0.0
        for prompt in self.prompts:
            tokens = self.write(prompt)
            text = [next(tokens)]
            begun = time.perf_counter()
            text += tokens
            seconds += time.perf_counter() - begun
            self.made.append(text)
        return seconds / max(1, sum(len(text) - 1 for text in self.made))

    def same(self, other: "Texts") -> int:
        """How many of the last texts are the other's."""
        return sum(mine == theirs for mine, theirs in zip(self.made, other.made))


def alone(gearbox: Gearbox, tokenizer: Any, most: int, prompt: Text) -> Iterator[int]:
    """The text of the top gear without drafts."""
    gearbox.shift(gearbox.ladder.top)
    return (response.token for response in mlx_lm.stream_generate(gearbox.model, tokenizer, prompt, most))


def drafted(gearbox: Gearbox, tokenizer: Any, most: int, prompt: Text) -> Iterator[int]:
    """The same text in mode lossless."""
    made = read_draft_file(CURVE)
    mode = Lossless(rule=made.rule(), draft=made.draft)
    responses = stream_generate(gearbox.model, tokenizer, prompt, most, gearbox=gearbox, mode=mode)
    return (response.token for response in responses)


def wide_model(times: int) -> Any:
    return widened(load()[0], times)


def open_peer(model: Any, kind: str, folder: Path, threads: int, **how: Any) -> Any:
    file = folder / f"{kind}.gguf"
    write_gguf(model, file, kind, CONTEXT)
    peer = open_model(file, CONTEXT, threads, **how)
    file.unlink()
    return peer


def check_texts(tokenizer: Any, prompts: list[Text], folder: Path, threads: int) -> None:
    """Compare the demo model's texts, where llama.cpp computes in float32 as we do.

    Raises:
        GearbxError: a text differs: then the GGUF is another model, and times would say nothing.
    """
    model = load()[0]
    peer = open_peer(model, "F32", folder, threads, exact=True)
    gearbox = Gearbox(model, "16", kernels="native", dtype="float32")
    for number, prompt in enumerate(prompts, 1):
        ours = [*alone(gearbox, tokenizer, CHECKED, prompt)]
        if ours != [*generated(peer, prompt, tokenizer.eos_token_ids, CHECKED)]:
            raise GearbxError(
                f"prompt {number}: in float32, llama.cpp's text is not the demo model's; its GGUF is wrong"
            )


def writers(args: Namespace, folder: Path, threads: int, tokenizer: Any) -> dict[str, Writer]:
    """Who writes the texts, ours and theirs in turn: without drafts, and with them."""
    gears = ",".join(map(str, read_draft_file(CURVE).gears))
    gearboxes = {
        name: Gearbox(wide_model(args.times), gears, kernels="native", activations=name) for name in args.activations
    }
    model = wide_model(args.times)
    drafter = Drafter(open_peer(model, TYPES[4], folder, threads), 0)
    peer = open_peer(model, TYPES[16], folder, threads, draft_model=drafter)

    def theirs(length: int, prompt: Text) -> Iterator[int]:
        drafter.length, peer.draft_model = length, drafter if length else None
        return generated(peer, prompt, tokenizer.eos_token_ids, args.max_tokens)

    first = next(iter(gearboxes.values()))  # the top gear computes with activations as they are
    ours = {OURS + ALONE: partial(alone, first, tokenizer, args.max_tokens)}
    ours |= {OURS + name: partial(drafted, gearbox, tokenizer, args.max_tokens) for name, gearbox in gearboxes.items()}
    lengths = {THEIRS + ALONE: 0} | {f"{THEIRS}{length}": length for length in args.draft_lengths}
    pairs = zip_longest(ours.items(), ((name, partial(theirs, length)) for name, length in lengths.items()))
    return dict(item for pair in pairs for item in pair if item)


def lossless_rows(rounds: Rounds, args: Namespace, folder: Path, threads: int) -> list[dict[str, Any]]:
    """The texts without drafts, and with drafts: each kind of activations of ours beside each length of llama.cpp's."""
    tokenizer = load()[1]
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts(args.prompts)[: args.num_prompts]]
    check_texts(tokenizer, prompts, folder, threads)
    texts = {name: Texts(write, prompts) for name, write in writers(args, folder, threads, tokenizer).items()}
    spent, bandwidth = rounds.time("lossless", texts)

    def row(ours: str, theirs: str) -> dict[str, Any]:
        mine, other = OURS + ours, THEIRS + theirs
        return {
            "activations": DENSE if ours == ALONE else ours,
            "llama_cpp_draft_tokens": 0 if theirs == ALONE else int(theirs),
            **compared(spent[mine], spent[other]),
            "speedup": gain(spent[OURS + ALONE], spent[mine]),
            "llama_cpp_speedup": gain(spent[THEIRS + ALONE], spent[other]),
            "identical": texts[mine].same(texts[OURS + ALONE]),
            "llama_cpp_identical": texts[other].same(texts[THEIRS + ALONE]),
            "llama_cpp_as_ours": texts[other].same(texts[mine]),
            "prompts": len(prompts),
            "read_bandwidth_gigabytes_per_second": bandwidth,
        }

    pairs = [(name, str(length)) for name in args.activations for length in args.draft_lengths]
    return [row(ours, theirs) for ours, theirs in [(ALONE, ALONE), *pairs]]
