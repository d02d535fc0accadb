"""Gears beside llama.cpp, in turn within one run: decoding, prompts and speculative decoding."""

import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile, zip_longest
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from pages import table
from rich.progress import Progress

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.benchmark import parse_shape
from gearbx_mlx.benchmark.decode import PROMPT, decode_seconds, random_llama
from gearbx_mlx.benchmark.measuring import bandwidth_meter, timed
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.decoding.draft_plans import SHIPPED, read_draft_file
from gearbx_mlx.errors import GearbxError

from .lossless import encode, widened
from .studies import HELD_OUT, Found, native_kernels, study

TYPES = {4: "Q4_0", 8: "Q8_0", 16: "F16"}  # of llama.cpp, by the bits of our gears
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(path: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    owner = path.removesuffix(".weight")
    if owner in NAMES:
        return f"{NAMES[owner]}.weight"
    number, _, rest = owner.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection in the order in which llama.cpp rotates them.

    mlx-lm rotates row i of a head together with row i + half, llama.cpp rows 2 i and 2 i + 1.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def in_their_order(path: str, weight: np.ndarray, args: Any) -> np.ndarray:
    """A weight as llama.cpp expects it: queries and keys have their rows interleaved."""
    if "q_proj" in path:
        return interleaved(weight, args.num_attention_heads)
    if "k_proj" in path:
        return interleaved(weight, args.num_key_value_heads)
    return weight


def write_gguf(model: Any, file: Path, kind: str, context: int, tokenizer: Path | None = None) -> None:
    """Write every matrix in a type of llama.cpp, and norms in float32. A tied head is the embeddings there too.

    Args:
        kind: Q4_0, Q8_0, F16 or F32.
        context: tokens that the model is said to be for.
        tokenizer: the demo model's tokenizer.json; without one, llama.cpp takes and gives numbers of tokens alone.
    """
    import gguf

    args, target = model.args, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_rope_dimension_count(args.hidden_size // args.num_attention_heads)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_vocab_size(args.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, json.loads(tokenizer.read_text(encoding="utf-8")))
    for path, array in tree_flatten(model.parameters()):
        weight = in_their_order(path, np.array(array.astype(mx.float32)), args)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(path), weight)
        else:
            writer.add_tensor(gguf_name(path), gguf.quants.quantize(weight, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, content: dict[str, Any]) -> None:
    """A byte-level BPE with single digits, as in the demo model's tokenizer.json: one token begins and ends texts."""
    import gguf

    numbers = content["model"]["vocab"]
    special = {token["id"]: token["content"] for token in content["added_tokens"] if token["special"]}
    names = sorted(numbers, key=numbers.__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # single digits, then the words of GPT-2
    writer.add_token_list(names)
    writer.add_token_types([control if number in special else normal for number in range(len(names))])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(min(special))
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(True)


BATCH = 512  # llama.cpp's default; prompts are as long


def open_model(
    file: Path, context: int, threads: int, draft_model: Callable[..., Any] | None = None, exact: bool = False
) -> Any:
    """A GGUF file in memory, as a `llama_cpp.Llama`.

    Args:
        context: tokens that its KV cache has room for.
        draft_model: proposes tokens that follow those it is given.
        exact: attention in float32, as ours, with keys and values in it. Otherwise flash attention, the faster one,
            with both in float16.
    """
    import llama_cpp

    cache = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
    return llama_cpp.Llama(
        str(file),
        n_ctx=context,
        n_batch=BATCH,
        n_threads=threads,
        n_threads_batch=threads,
        use_mmap=False,  # so that q4_0 is put into the order of its fastest product
        flash_attn=not exact,
        type_k=cache,
        type_v=cache,
        draft_model=draft_model,
        verbose=False,
    )


def favourite(model: Any) -> int:
    """The token with the largest of the last logits."""
    import llama_cpp

    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())


def first_after(model: Any, prompt: Sequence[int]) -> int:
    read_again(model, prompt)
    return favourite(model)


def read_again(model: Any, tokens: Sequence[int], keep: int = 0) -> None:
    """Compute the tokens that follow the first `keep` ones of the KV cache, and forget what else followed them."""
    model.n_tokens = keep
    model.eval(tokens)


def follow(model: Any) -> Iterator[int]:
    """The greedy continuation of what the model has read, computed as it is asked for."""
    while True:
        token = favourite(model)
        yield token
        model.eval([token])


class Drafter:
    """A draft model for `llama_cpp.Llama`: the greedy continuation by another one.

    What the texts of two calls begin with is computed once: the KV cache keeps it.
    """

    def __init__(self, model: Any, length: int, continuation: Callable[[Any], Iterator[int]] = follow) -> None:
        self.model, self.length, self.continuation = model, length, continuation
        self.read: list[int] = []  # tokens whose keys and values are in the cache

    def __call__(self, text: np.ndarray, /, **_: Any) -> np.ndarray:
        """Tokens to verify after the text, `length` of them."""
        tokens = text.tolist()
        # The last token is computed in any case: the logits after it are what the draft begins with.
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.read, tokens[:-1])))
        read_again(self.model, tokens[common:], common)
        drafted = list(islice(self.continuation(self.model), self.length))
        self.read = tokens + drafted[:-1]
        return np.array(drafted, dtype=np.intc)


def generated(model: Any, prompt: Sequence[int], stop: set[int], most: int) -> Iterator[int]:
    """The greedy text after a prompt, with the model's draft model if it has one, up to a token of `stop`.

    Args:
        most: the number of tokens, if no such token comes.
    """
    model.reset()
    for token in islice(model.generate(list(prompt), temp=0.0, repeat_penalty=1.0), most):
        yield token
        if token in stop:
            return


THEIRS = "llama.cpp"
DENSE = "float"  # activations of our top gear, whose weights are not packed
PAUSE = 0.02  # seconds, in which threads that look for work fall asleep

Clock = Callable[[], float]  # seconds per token, when called


@dataclass(frozen=True)
class Rounds:
    """How often everything is timed, beside the read bandwidth of the machine.

    Args:
        read_bandwidth: GB/s, when called.
    """

    trials: int
    read_bandwidth: Clock
    progress: Progress

    def time(self, what: str, clocks: Mapping[str, Clock]) -> tuple[dict[str, list[float]], float]:
        """Seconds per token of each clock in each trial, all in turn after a warm-up, and the median bandwidth."""
        spent: dict[str, list[float]] = {name: [] for name in clocks}
        bandwidths = []
        for trial in self.progress.track(range(self.trials + 1), description=what):
            bandwidths.append(self.read_bandwidth())
            for name, clock in clocks.items():
                time.sleep(PAUSE)
                seconds = clock()
                mx.synchronize()  # mlx-lm begins a token more than it hands out
                if trial:
                    spent[name].append(seconds)
        return spent, statistics.median(bandwidths)


def gain(before: list[float], after: list[float]) -> float:
    """How many times as fast: the median of the trials."""
    return statistics.median(old / new for old, new in zip(before, after))


def compared(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Tokens per second of both, and how many times as fast ours is: the median of the trials, smallest and largest."""
    ratios = [other / own for own, other in zip(ours, theirs)]
    return {
        "tokens_per_second": 1 / statistics.median(ours),
        "llama_cpp_tokens_per_second": 1 / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
    }


def rows_of(spent: Mapping[str, list[float]], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each activations of ours, beside llama.cpp's times."""
    return [
        shared | {"activations": name} | compared(seconds, spent[THEIRS])
        for name, seconds in spent.items()
        if name != THEIRS
    ]


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
        clocks: dict[str, Callable[..., float]] = {}
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
            return timed(lambda: first_after(peer, prompt)) / PROMPT_TOKENS

        rows += models.compare(bits, rounds, "prompt", ours, theirs, {"prompt_tokens": PROMPT_TOKENS})
    return rows


def first_token_seconds(model: Any, prompt: list[int]) -> float:
    """Seconds per token of the prompt, until mlx-lm hands out the first token after it."""
    steps = generate_step(mx.array(prompt), model, max_tokens=1)
    return timed(lambda: next(steps)) / len(prompt)


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


Row = Mapping[str, Any]
Column = Callable[[Row], object]


def significant(number: float) -> str:
    """Three digits, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def spread(row: Row) -> str:
    return "-".join(f"{number:.2f}" for number in row["spread"])


SIDES: dict[str, Column] = {
    "bits": lambda row: row["bits"],
    "llama.cpp's type": lambda row: row["llama_cpp_type"],
    "activations": lambda row: row["activations"],
}
SPEEDS: dict[str, Column] = {
    "ours, tokens/s": lambda row: significant(row["tokens_per_second"]),
    "llama.cpp, tokens/s": lambda row: significant(row["llama_cpp_tokens_per_second"]),
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "spread": spread,
}
READ: dict[str, Column] = {"read, GB/s": lambda row: f"{row['read_bandwidth_gigabytes_per_second']:.1f}"}
COLUMNS: dict[str, dict[str, Column]] = {
    "decode": {"context": lambda row: row["context"], **SIDES, **SPEEDS, **READ},
    "prompt": {"tokens": lambda row: row["prompt_tokens"], **SIDES, **SPEEDS, **READ},
    "lossless": {
        "activations": lambda row: row["activations"],
        "llama.cpp drafts": lambda row: row["llama_cpp_draft_tokens"] or "none",
        **SPEEDS,
        "drafts gain us": lambda row: f"{row['speedup']:.2f}",
        "llama.cpp": lambda row: f"{row['llama_cpp_speedup']:.2f}",
        "texts unchanged, ours": lambda row: f"{row['identical']} of {row['prompts']}",
        "theirs": lambda row: f"{row['llama_cpp_identical']} of {row['prompts']}",
    },
}


def table_of(subject: str, rows: Sequence[Row]) -> str:
    """The rows of a subject: decode, prompt or lossless."""
    columns = COLUMNS[subject]
    return table([*columns], [[column(row) for column in columns.values()] for row in rows])


def versions() -> dict[str, str]:
    """Raises GearbxError where a package is missing."""
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        raise GearbxError(f"{error.name} is not installed: pip install llama-cpp-python gguf") from error
    return {"llama_cpp_python": llama_cpp.__version__}


def measure(args: Namespace) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """The rows of each subject, and the number of threads."""
    native = native_kernels()
    found = {}
    with tempfile.TemporaryDirectory() as name, progress_bar() as progress:
        folder, threads = Path(name), native.threads()
        rounds = Rounds(args.trials, bandwidth_meter(), progress)
        if {"decode", "prompt"} & {*args.subjects}:
            models = RandomModels(args, folder, threads)
            if "decode" in args.subjects:
                found["decode"] = decode_rows(models, rounds, args)
            if "prompt" in args.subjects:
                found["prompt"] = prompt_rows(models, rounds)
            del models  # gigabytes
        if "lossless" in args.subjects:
            found["lossless"] = lossless_rows(rounds, args, folder, threads)
    return found, threads


Subject = Literal["decode", "prompt", "lossless"]
Activations = Literal["float", "int16", "int8"]


@study("docs/performance.md", minutes=60)
def compare_llama_cpp(
    subjects: list[Subject] = ["decode", "prompt", "lossless"],  # noqa: B006 - nothing changes it
    shape: str = "1024x24",
    contexts: list[int] = [1, 1000, 4000],  # noqa: B006
    tokens: int = 16,
    activations: list[Activations] = ["int16", "int8"],  # noqa: B006
    times: Literal[1, 2, 4, 8, 16] = 8,
    prompts: Path = HELD_OUT,
    num_prompts: int = 4,
    max_tokens: int = 48,
    draft_lengths: list[int] = [3, 8],  # noqa: B006
    trials: int = 5,
) -> Found:
    """Gears beside llama.cpp (pip install llama-cpp-python gguf), in turn within one run.

    decode: tokens of a random Llama after contexts of several lengths. prompt: 512 tokens of the same Llama, up to the
    first one of the answer. lossless: real texts by the demo model, widened: mode lossless beside
    llama.cpp's speculative decoding with q4_0 of the same model as its draft model.

    The models become GGUF files in f16, q8_0 and q4_0 in a temporary directory, with the rows of queries and keys in
    the order that llama.cpp rotates. So both sides write the same texts, up to rounding, which is checked in float32.
    Both sides have as many threads (GEARBX_THREADS, or one per core). llama.cpp keeps keys and values in 16 bits, we in
    32. Nothing else may run meanwhile: llama.cpp's threads wait for each other without sleeping.

    Args:
        shape: WIDTHxLAYERS.
        tokens: Decoded in a trial.
        activations: Of our gears, each in turn.
        times: Copies of every unit of the demo model.
        prompts: One per line, or JSON Lines.
        max_tokens: Of a text.
        draft_lengths: llama.cpp's; its own default is 3.
    """
    installed = versions()
    parse_shape(shape)
    for name, value, least in (("trials", trials, 1), ("tokens", tokens, 1), ("contexts", min(contexts), 0)):
        if value < least:
            raise GearbxError(f"--{name} {value}: is too few; give {least} or more")
    args = Namespace(**{name: value for name, value in locals().items() if name not in ("installed", "name", "value")})
    found, threads = measure(args)
    tables = {f"llama_cpp_{subject}": table_of(subject, found[subject]) for subject in found}
    return Found(tables, found | {"threads": threads} | installed)
