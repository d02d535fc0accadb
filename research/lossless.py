"""Mode lossless: savings of bytes and time, and identical outputs, for docs/evidence.md and docs/performance.md."""

import contextlib
import copy
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from rich.progress import track

from gearbx_mlx import Gearbox, Ladder, Lossless, Static, load, make_sampler, stream_generate
from gearbx_mlx.cli.bases import answered, make_base, text_of
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.compat.classes import of_classes
from gearbx_mlx.conversion.calibrated_base import CalibratedBase
from gearbx_mlx.conversion.kept_bases import key_of
from gearbx_mlx.decoding.drafters import low_gear
from gearbx_mlx.decoding.policy import DEFAULT_LENGTH, MAX_DRAFTED
from gearbx_mlx.decoding.response import DRAFT
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import Format
from gearbx_mlx.gears.ladder import DEFAULT_GROUP_SIZE, Gear

from .studies import DATA, HELD_OUT, Found, by_kernels, named, ratios, spread, study, table_here

ASSISTANT = DATA / "assistant.txt"  # a dozen questions of a chat, and a dozen for code
EXPECTED_LEAST = 5  # expected draws in a cell of the chi-square test; rarer outcomes share one cell


def encode(tokenizer, prompt):
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def first_prompts(tokenizer, files: list[Path], counts: list[int]) -> list[list[int]]:
    """Return tokens of the first prompts of each file."""
    texts = [read_prompts(file)[:count] for file, count in zip(files, counts, strict=True)]
    return [list(encode(tokenizer, text)) for text in itertools.chain(*texts)]


@dataclass
class Texts:
    """What the parts of the study `lossless` share: gears, how they draft, and the top gear's text of each prompt."""

    gearbox: Gearbox
    tokenizer: Any
    draft: Gear
    max_tokens: int
    prompts: list[list[int]]
    texts: list[list[int]]

    def lossless(self, length: int, label: str) -> dict[str, Any]:
        """Return the bytes that drafts of a length read, and the number of outputs identical to the top gear's."""
        gearbox, mode = self.gearbox, Lossless(self.draft.bits, draft_length=length)
        found: Counter[str] = Counter()
        for prompt, text in zip(track(self.prompts, label), self.texts):
            how: dict[str, Any] = {"gearbox": gearbox, "mode": mode}
            responses = list(stream_generate(gearbox.model, self.tokenizer, prompt, self.max_tokens, **how))
            found["identical"] += [r.token for r in responses] == text
            found["tokens"] += len(responses)
            found["read"] += sum(r.weight_bytes for r in responses)
            found["drafted"] += sum(r.drafted for r in responses)
            found["accepted"] += sum(r.from_draft for r in responses)
            found["verifications"] += sum(r.passes[-1] for r in responses)
            found["near_ties"] += sum(r.near_tie for r in responses)
        read, tokens, drafted = found.pop("read"), found["tokens"], found["drafted"]
        return {
            **found,
            "texts": len(self.texts),
            "acceptance_rate": found["accepted"] / drafted if drafted else 0.0,
            "tokens_per_verification": tokens / found["verifications"],
            "weight_bytes_per_token": read / tokens,
            "times_fewer_bytes": gearbox.weight_bytes_per_token(gearbox.ladder.top) * tokens / read,
            "times_fewer_bytes_than_original": gearbox.original_bytes_per_token() * tokens / read,
        }

    def speculative(self, drafting: Gearbox, length: int) -> dict[str, Any]:
        """mlx-lm's speculative decoding, whose draft model is a copy of the model in the draft gear."""
        top, low = self.gearbox.ladder.top, drafting.ladder.find(self.draft.bits)
        top_bytes, low_bytes = self.gearbox.weight_bytes_per_token(top), drafting.weight_bytes_per_token(low)
        read = tokens = identical = 0
        for prompt, text in zip(track(self.prompts, f"mlx-lm speculative, {length}"), self.texts):
            self.gearbox.shift(top)
            drafting.shift(low)
            with counted(self.gearbox.model, drafting.model, after=len(prompt) - 1) as counts:
                how = {"draft_model": drafting.model, "num_draft_tokens": length}
                run = mlx_lm.stream_generate(self.gearbox.model, self.tokenizer, prompt, self.max_tokens, **how)
                out = [response.token for response in run]
            identical += out == text
            tokens += len(out)
            read += counts[0] * top_bytes + counts[1] * low_bytes
        return {
            "identical": identical,
            "weight_bytes_per_token": read / tokens,
            "times_fewer_bytes": top_bytes * tokens / read,
        }


@contextlib.contextmanager
def counted(*models, after):
    """In the block, the passes of each model are counted from an entry of its KV cache on."""
    counts = [0] * len(models)

    def counting(place, kind):
        def call(self, inputs, cache=None, **kwargs):
            counts[place] += cache[0].offset >= after
            return kind.__call__(self, inputs, cache=cache, **kwargs)

        return type(kind.__name__, (kind,), {"__call__": call})

    with of_classes((model, counting(place, type(model))) for place, model in enumerate(models)):
        yield counts


def chi_square(counts, expected, draws):
    """Compare counts of outcomes with their probabilities. The p-value is Wilson and Hilferty's approximation."""
    common = {outcome: p * draws for outcome, p in expected.items() if p * draws >= EXPECTED_LEAST}
    rest = draws - sum(common.values())
    cells = [(counts.get(outcome, 0), e) for outcome, e in common.items()]
    if rest >= EXPECTED_LEAST:
        cells.append((draws - sum(count for count, _ in cells), rest))
    freedom = len(cells) - 1
    if freedom < 1:
        return None
    statistic = sum((count - e) ** 2 / e for count, e in cells)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return {"statistic": statistic, "freedom": freedom, "p": 1 - statistics.NormalDist().cdf(z)}


def probabilities(logits, temp):
    return mx.softmax(logits.astype(mx.float32) / temp, axis=-1)


def draw_pairs(gearbox, tokenizer, prompt, mode, temp, draws, label):
    """Draw the next two tokens in lossless mode, and compare them with the top gear's own probabilities."""
    model, sampler = gearbox.model, make_sampler(temp)
    gearbox.shift(gearbox.ladder.top)
    begun = make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=begun)
    last = mx.array([[prompt[-1]]])
    first = probabilities(model(last, cache=copy.deepcopy(begun))[0, -1], temp)
    order = np.argsort(-np.array(first))[:64].tolist()
    expected = {}
    for token in order:  # only pairs that are likely enough for a cell of their own
        share = first[token].item()
        if share * draws < EXPECTED_LEAST:
            break
        cache = copy.deepcopy(begun)
        model(last, cache=cache)
        second = probabilities(model(mx.array([[token]]), cache=cache)[0, -1], temp)
        for other in np.argsort(-np.array(second))[:64].tolist():
            expected[token, other] = share * second[other].item()
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in track(range(draws), label):
        mx.random.seed(1_000_003 * seed + len(prompt))
        how = {"gearbox": gearbox, "mode": mode, "sampler": sampler, "prompt_cache": copy.deepcopy(begun)}
        counts[tuple(r.token for r in stream_generate(model, tokenizer, prompt[-1:], 2, **how))] += 1
    return chi_square(counts, expected, draws)


WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def widened(model, times):
    """Return a Llama with tied embeddings that computes the same logits with `times` copies of every unit.

    It is larger than a processor's cache, and accepts drafts as the model does (Net2Net; Chen, Goodfellow, Shlens 2016,
    arXiv:1511.05641).

    Division by a power of two is exact, and copies of a group of weights have the same codes, so gears compute the same
    too. The head reads the embedding, which is not divided; the last norm is divided instead.
    """
    args = replace(model.args, **{name: times * getattr(model.args, name) for name in WIDTHS})
    wide = llama.Model(args)
    arrays = []
    for path, array in tree_flatten(model.parameters()):
        if array.ndim == 1 or "embed_tokens" in path:
            array = mx.tile(array, (1,) * (array.ndim - 1) + (times,))
            array = array / times if path == "model.norm.weight" else array
        else:
            array = mx.tile(array, (times, times)) / times
        arrays.append((path, array))
    wide.update(tree_unflatten(arrays))
    mx.eval(wide.parameters())
    return wide


@study(minutes=10)
def lossless(
    prompts: Path,
    model: str | None = None,
    num_prompts: int = 50,
    max_tokens: int = 128,
    gears: str = "4,16",
    q_group_size: int = 64,
    format: str = "planes",
    kernels: str = "native",
    activations: Literal["float", "int16", "int8"] = "float",
    lengths: list[int] = [3, 5, 8],  # noqa: B006 - nothing changes it
    speculative: list[int] = [],  # noqa: B006
    draws: int = 0,
    temp: float = 0.8,
) -> Found:
    """Measure the bytes that mode lossless reads with fixed draft lengths, against the top gear and mlx-lm's drafting.

    For each prompt, mlx-lm generates in the top gear, and mode lossless with each draft length. Outputs are compared
    token for token, and the bytes of weights read per token are counted. The draft model of mlx-lm's speculative
    decoding is a copy of the model in the draft gear.

    Args:
        prompts: File with one prompt per line, or JSON Lines as in GSM8K.
        model: Directory; the bundled model if omitted.
        format: Storage of the gears.
        speculative: Draft lengths of mlx-lm's speculative decoding.
        draws: Number of times to sample two tokens for each of ten prompts, compared with the top gear's probabilities.
    """
    settings: dict[str, Any] = {
        "kernels": kernels,
        "activations": activations,
        "group_size": q_group_size,
        "format": format,
    }
    loaded, tokenizer = load(model)
    gearbox = Gearbox(loaded, gears, **settings)
    draft = gearbox.ladder[0]
    asked = [encode(tokenizer, prompt) for prompt in read_prompts(prompts)[:num_prompts]]
    gearbox.shift(gearbox.ladder.top)
    texts = []
    for prompt in track(asked, "the top gear alone"):
        texts.append([r.token for r in mlx_lm.stream_generate(loaded, tokenizer, prompt, max_tokens)])
    whole = Texts(gearbox, tokenizer, draft, max_tokens, asked, texts)
    fixed = {length: whole.lossless(length, f"drafts of {length}") for length in lengths}
    result: dict[str, Any] = {
        "model": model or "demo",
        "gears": [gear.bits for gear in gearbox.ladder],
        "draft_bits": draft.bits,
        "format": format,
        "kernels": kernels,
        "activations": activations,
        "prompts": len(asked),
        "max_tokens": max_tokens,
        "weight_bytes_top": gearbox.weight_bytes_per_token(gearbox.ladder.top),
        "weight_bytes_draft": gearbox.weight_bytes_per_token(draft),
        "fixed": fixed,
        "best_fixed": min(fixed, key=lambda length: fixed[length]["weight_bytes_per_token"], default=None),
    }
    if speculative:
        second = Gearbox(load(model)[0], gears, **settings)
        result["mlx_lm_speculative"] = {length: whole.speculative(second, length) for length in speculative}
    if draws:
        mode = Lossless(draft.bits, draft_length=DEFAULT_LENGTH)
        result["chi_square"] = [
            draw_pairs(gearbox, tokenizer, prompt, mode, temp, draws, f"draws, prompt {number}")
            for number, prompt in enumerate(whole.prompts[:10], 1)
        ]
    print(json.dumps(result, indent=2))
    return Found(data=result)


SETTINGS = {
    "planes 4,16": ("4,16", "planes"),
    "planes 4,16, calibrated": ("4,16", "planes"),
    "exact 4,16": ("4,16", "exact"),
    "planes 4,8": ("4,8", "planes"),
}
CALIBRATED = "calibrated"
PLAIN = "plain 16-bit decoding"


def shipped_base(model: Any, tokenizer: Any, format: Format, ladder: Sequence[int]) -> CalibratedBase:
    """Return the base that is calibrated with what ships; an earlier run's base is used if it was kept."""
    text = text_of(tokenizer, None)
    key = key_of(model, format, ladder, "all", DEFAULT_GROUP_SIZE, text)
    base = key.find()
    if base is None:
        with progress_bar() as progress:
            texts = text.sequences + answered(model, tokenizer, text.requests, progress)
            base = make_base(model, key, texts, progress)
    return base


class Writer:
    """A model in gears that writes texts in lossless mode, or by the top gear alone: tokens, and seconds of each."""

    temp = 0.0

    def __init__(
        self,
        model: str,
        gears: str,
        format: str | None,
        mode: Lossless,
        calibrated: bool = False,
        low_model: str | None = None,
    ):
        loaded, self.tokenizer = load(model)
        self.mode = mode
        if not calibrated:
            low = None if low_model is None else load(low_model)[0]
            self.gearbox = Gearbox(loaded, gears, format=format, low_model=low)
            return
        ladder = [gear.bits for gear in Ladder.parse(gears)]
        base = shipped_base(loaded, self.tokenizer, get_format(format or "planes"), ladder)
        self.gearbox = Gearbox(loaded, gears, format=format, base=base.layers)

    def alone(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        return self.written(Static(), prompt, max_tokens)

    def low(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        return self.written(Static("low"), prompt, max_tokens)

    def lossless(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        return self.written(self.mode, prompt, max_tokens)

    def written(self, mode: Lossless | Static, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        return generated(self.responses(mode, prompt, max_tokens))

    def responses(
        self, mode: Lossless | Static, prompt: list[int], max_tokens: int, sampler: Any = None
    ) -> Iterator[Any]:
        """Greedily, or with the same random numbers every time. sampler: if None, one of the writer's temperature."""
        box = self.gearbox
        mx.random.seed(0)
        given: dict[str, Any] = {"gearbox": box, "mode": mode, "sampler": sampler or make_sampler(self.temp)}
        return stream_generate(box.model, self.tokenizer, prompt, max_tokens, **given)

    def sampled(
        self, sampler: Any, mode: Lossless | Static, prompt: list[int], max_tokens: int
    ) -> tuple[tuple[list[int], int, int], float]:
        """Return the tokens, the numbers of drafted and of accepted tokens, and the seconds per token."""
        seen: list[Any] = []

        def noted() -> Iterator[Any]:
            for each in self.responses(mode, prompt, max_tokens, sampler):
                seen.append(each)
                yield each

        tokens, seconds = generated(noted())
        accepted = sum(each.source == DRAFT for each in seen)
        return (tokens, sum(each.drafted for each in seen), accepted), seconds


Name = TypeVar("Name")


def written_in_turn(
    ways: Mapping[Name, Callable[[list[int], int], tuple[Any, float]]],
    prompts: list[list[int]],
    tokens: int,
    pairs: int,
) -> dict[Name, list[list[tuple[Any, float]]]]:
    """Return, for each mode and prompt: the outputs of so many trials, and the times of their tokens."""
    found: dict[Name, list[list[tuple[Any, float]]]] = {name: [[] for _ in prompts] for name in ways}
    for write in ways.values():  # makes the gears
        write(prompts[0], 32)
    for place, prompt in enumerate(track(prompts, "prompts")):
        for _ in range(pairs):
            for name, write in ways.items():
                found[name][place].append(write(prompt, tokens))
    return found


def times_faster(first: list[list[tuple[Any, float]]], other: list[list[tuple[Any, float]]]) -> list[float]:
    """Return, for each prompt, the speedup of a mode over the first one, the median of the trials."""
    seconds = ([[spent for _, spent in trials] for trials in way] for way in (first, other))
    return [statistics.median(ratios(a, b)) for a, b in zip(*seconds, strict=True)]


def times_faster_once(first: list[list[tuple[Any, float]]], other: list[list[tuple[Any, float]]]) -> list[float]:
    """Like `times_faster`, where the first way has one trial of each prompt."""
    return [a[0][1] / statistics.median(spent for _, spent in b) for a, b in zip(first, other, strict=True)]


def token_ms(way: list[list[tuple[Any, float]]]) -> float:
    """Return milliseconds of a token of a way, the median of all its texts."""
    return 1000 * statistics.median(spent for trials in way for _, spent in trials)


def agreeing(first: list[list[tuple[Any, float]]], other: list[list[tuple[Any, float]]]) -> int:
    """Return the number of prompts whose outputs, in all trials, equal the first mode's in its first trial."""
    return sum(all(text == trials[0][0] for text, _ in own) for trials, own in zip(first, other, strict=True))


def generated(responses: Iterable[Any]) -> tuple[list[int], float]:
    """Return the tokens, and the seconds per token after the first."""
    begun, tokens = 0.0, []
    for response in responses:
        begun = begun or time.perf_counter()
        tokens.append(response.token)
    return tokens, (time.perf_counter() - begun) / max(len(tokens) - 1, 1)


@study("docs/performance.md", "research/tables.md", minutes=30)
def lossless_time(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [12, 24],  # noqa: B006
    model: str = "smollm2",
    settings: list[str] = [*SETTINGS],  # noqa: B006
    max_tokens: int = 200,
    pairs: int = 5,
    lookup_tokens: int = MAX_DRAFTED,
) -> Found:
    """Time mode lossless on a real language model against plain 16-bit decoding.

    For every prompt, plain 16-bit decoding and mode lossless in each setting alternate. Plain decoding runs twice, to
    show the variation of the machine. Prefill is not counted.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        settings: Formats and gears, as named in the table.
        pairs: Trials of a prompt; the median counts.
        lookup_tokens: As of `generate`; 0: no lookup.
    """
    mode = Lossless(lookup_tokens=lookup_tokens)
    plain = Writer(model, "4,16", "planes", mode)
    writers = {name: Writer(model, *SETTINGS[name], mode, name.endswith(CALIBRATED)) for name in settings}
    ways = {"first": plain.alone, PLAIN: plain.alone} | {name: writer.lossless for name, writer in writers.items()}
    asked = first_prompts(plain.tokenizer, prompts, num_prompts)
    found = written_in_turn(ways, asked, max_tokens, pairs)
    faster = {name: times_faster(found["first"], each) for name, each in found.items()}
    same = {}
    for name, each in found.items():
        top = [[writers[name].alone(prompt, max_tokens)] for prompt in asked] if name.endswith("8") else found["first"]
        same[name] = agreeing(top, each)
    rows = [[name, spread(faster[name]), f"{same[name]} of {len(asked)}"] for name in ways if name != "first"]
    head = [
        f"{named(model)}, {len(asked)} prompts, {max_tokens} tokens",
        "speedup: median (range)",
        "identical outputs",
    ]
    block = "lossless_time" if lookup_tokens else "lossless_time_without_lookup"
    return Found({by_kernels(block): table_here(head, rows)}, {"faster": faster, "same": same})


@study("docs/results.md", minutes=2)
def beside_mlx_lm(
    prompts: list[Path] = [ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [3],  # noqa: B006
    model: str = "smollm2",
    max_tokens: int = 100,
    trials: int = 3,
) -> Found:
    """Compare tokens/s of one gear and of mode lossless with mlx-lm's, which generates each output once.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        trials: Outputs of one gear and of mode lossless for each prompt; the median counts.
    """
    writer, (plain, tokenizer) = Writer(model, "4,16", "planes", Lossless()), load(model)
    asked = first_prompts(tokenizer, prompts, num_prompts)

    def by_mlx_lm(prompt: list[int], most: int) -> tuple[list[int], float]:
        return generated(mlx_lm.stream_generate(plain, tokenizer, prompt, most))

    ways: dict[str, Callable[..., Any]] = {
        "mlx-lm": by_mlx_lm,
        "one 16-bit gear (`--mode static`)": writer.alone,
        "`--mode lossless`, the default": writer.lossless,
    }
    for write in (writer.alone, writer.lossless):  # makes the gears
        write(asked[0], 32)
    found = {name: [[write(prompt, max_tokens)] for prompt in asked] for name, write in ways.items()}
    for place, prompt in enumerate(asked):
        for name in [*ways][1:] * (trials - 1):
            found[name][place].append(ways[name](prompt, max_tokens))
    first = found["mlx-lm"]
    rows, data = [], {}
    for name, each in found.items():
        speed, faster, same = 1000 / token_ms(each), times_faster_once(first, each), agreeing(first, each)
        rows.append([name, f"{speed:.1f}", spread(faster), f"{same} of {len(asked)}"])
        data[name] = {"tokens_per_second": speed, "faster": faster, "same": same}
    head = [
        f"{named(model)}, {len(asked)} prompts, {max_tokens} tokens",
        "tokens/s",
        "speedup: median (range)",
    ]
    return Found({"beside_mlx_lm": table_here([*head, "outputs identical to mlx-lm's"], rows)}, data)


@study("docs/performance.md", minutes=12)
def draft_model(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    model: str = "smollm2",
    num_draft_tokens: list[int] = [2, 3, 5],  # noqa: B006
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Time mlx-lm's `--draft-model` with a 4-bit copy of the model against mode lossless.

    Both models use this package's kernels, because generation with MLX's own takes minutes on a CPU. Mode lossless
    drafts without prompt lookup, like mlx-lm.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        num_draft_tokens: Draft lengths of mlx-lm; its default is 2 in Python and 3 on the command line.
        pairs: Trials of a prompt; the median counts.
    """
    writer = Writer(model, "4,16", "planes", Lossless(lookup_tokens=0))
    original, copy = (Gearbox(load(model)[0], "4,16", format="planes", kernels="native") for _ in range(2))
    copy.shift("low")

    def speculative(count: int, prompt: list[int], most: int) -> Any:
        how = {"draft_model": copy.model, "num_draft_tokens": count}
        return generated(mlx_lm.stream_generate(original.model, writer.tokenizer, prompt, most, **how))

    ways: dict[str, Callable[..., Any]] = {PLAIN: writer.alone, "mode lossless": writer.lossless}
    ways |= {f"--draft-model, {count} tokens": partial(speculative, count) for count in num_draft_tokens}
    found = written_in_turn(ways, first_prompts(writer.tokenizer, prompts, num_prompts), max_tokens, pairs)
    first = next(iter(found.values()))
    rows = [[name, f"{token_ms(each):.1f}", spread(times_faster(first, each))] for name, each in found.items()]
    head = [named(model), "ms/token", "speedup: median (range)"]
    return Found({"draft_model": table_here(head, rows)}, rows)


@study("docs/performance.md", minutes=3)
def draft_activations(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    model: str = "smollm2",
    draft_length: int = 4,
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Time drafts with activations quantized to 16 and to 8 bits, and measure the acceptance rates.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        draft_length: Tokens of each draft.
        pairs: Trials of a prompt; the median counts.
    """
    writer = Writer(model, "4,16", "planes", Lossless(draft_length=draft_length))
    sampler = make_sampler(0.0)

    def write(bits: int, prompt: list[int], most: int) -> Any:
        with patch.object(low_gear, "ACTIVATION_BITS", bits):
            return writer.sampled(sampler, writer.mode, prompt, most)

    ways = {bits: partial(write, bits) for bits in (16, 8)}
    found = written_in_turn(ways, first_prompts(writer.tokenizer, prompts, num_prompts), max_tokens, pairs)
    rows = []
    for bits, way in found.items():
        counts = [trials[0][0] for trials in way]
        rate = sum(accepted for _, _, accepted in counts) / sum(drafted for _, drafted, _ in counts)
        rows.append([f"{bits}", f"{rate:.3f}", f"{token_ms(way):.1f}", spread(times_faster(found[16], way))])
    head = [f"bits of a draft's activations, {named(model)}", "acceptance rate", "ms/token", "speedup: median (range)"]
    return Found({"draft_activations": table_here(head, rows)}, rows)


SAMPLINGS: dict[str, dict[str, float]] = {
    "0.7": {"temp": 0.7},
    "0.7, top-p 0.9": {"temp": 0.7, "top_p": 0.9},
    "1.0": {"temp": 1.0},
}


@study("research/tables.md", minutes=8)
def lossless_sampled(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [3, 6],  # noqa: B006
    model: str = "smollm2",
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Time mode lossless with sampling, by mlx-lm's sampler and by this package's.

    Drafts have a GPTQ-calibrated base. Each sampler is timed against plain decoding with mlx-lm's sampler; its outputs
    are compared with those of plain decoding with the same sampler.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        pairs: Trials of a prompt; the median counts.
    """
    writer = Writer(model, "4,16", "planes", Lossless(), calibrated=True)
    asked = first_prompts(writer.tokenizer, prompts, num_prompts)
    makers: dict[str, Callable[..., Any]] = {"mlx-lm's": mlx_lm_sampler, "gearbx-mlx's": make_sampler}
    rows, data = [], {}
    for name, numbers in SAMPLINGS.items():
        ways = {
            (whose, mode.name): partial(writer.sampled, make(**numbers), mode)
            for whose, make in makers.items()
            for mode in (Static(), writer.mode)
        }
        found = written_in_turn(ways, asked, max_tokens, pairs)
        first = next(iter(found.values()))
        for (whose, mode), written in found.items():
            faster = times_faster(first, written)
            same = sum(
                all(text[0] == top[0][0][0] for text, _ in trials)
                for trials, top in zip(written, found[whose, "static"])
            )
            ms = token_ms(written)
            drafted, accepted = (sum(text[i] for trials in written for text, _ in trials) for i in (1, 2))
            share = f"{accepted / drafted:.2f}" if drafted else ""
            rows.append([name, whose, mode, f"{ms:.1f}", spread(faster), share, f"{same} of {len(asked)}"])
            data[f"{name}, {whose}, {mode}"] = faster
    head = ["temperature", "sampler", "mode", "ms/token", "speedup: median (range)"]
    head += ["acceptance rate", "identical outputs"]
    return Found({"lossless_sampled": table_here(head, rows)}, data)


@study("docs/performance.md", minutes=12)
def lossless_contexts(
    text: Path,
    model: str = "smollm2",
    contexts: list[int] = [100, 1000, 4000],  # noqa: B006 - nothing changes it
    temps: list[float] = [0.0, 0.7],  # noqa: B006
    num_prompts: int = 4,
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Time mode lossless after short and long contexts, greedy and sampled.

    Prompts are parts of a text. Both modes draw the same random numbers, so sampled outputs must be identical too.

    Args:
        text: Source of the prompts; the page uses WikiText-2's test set.
        num_prompts: Number of prompts of each length.
        pairs: Trials of a prompt; the median counts.
    """
    writer = Writer(model, "4,16", "planes", Lossless())
    whole = writer.tokenizer.encode(text.read_text(encoding="utf-8"), verbose=False)
    rows, data = [], []
    for context in contexts:
        prompts = [whole[start : start + context] for start in range(0, num_prompts * context, context)]
        for temp in temps:
            writer.temp = temp
            found = written_in_turn({"alone": writer.alone, "lossless": writer.lossless}, prompts, max_tokens, pairs)
            both = found["alone"], found["lossless"]
            faster, same = times_faster(*both), agreeing(*both)
            alone_ms = token_ms(found["alone"])
            rows.append([context, temp, f"{alone_ms:.1f}", spread(faster), f"{same} of {len(prompts)}"])
            data.append({"context": context, "temp": temp, "alone_ms": alone_ms, "faster": faster, "same": same})
    head = ["context tokens", "temperature", "16 bits, ms/token", "speedup: median (range)", "identical outputs"]
    return Found({"lossless_contexts": table_here(head, rows)}, data)


@study("docs/performance.md", minutes=4)
def pages_of_weights(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    model: str = "smollm2",
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Time a token with weights in pages of 4 KB (MLX's) and of 2 MB (requested by this package), alternating.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        num_prompts: Number of prompts of each file.
        pairs: Trials of a prompt; the median counts.
    """
    writers = {}
    for size in ("4 KB", "2 MB"):
        with contextlib.ExitStack() as patched:
            if size == "4 KB":
                for user in ("gearbx_mlx.loading", "gearbx_mlx.gears.gearbox"):
                    patched.enter_context(patch(f"{user}.large_pages", contextlib.nullcontext))
            writers[size] = Writer(model, "4,16", "planes", Lossless())
            for gear in writers[size].gearbox.ladder:
                writers[size].gearbox.make(gear)
    kinds = {"16 bits": "alone", "4 bits": "low", "lossless": "lossless"}
    ways = {(way, size): getattr(writer, name) for way, name in kinds.items() for size, writer in writers.items()}
    found = written_in_turn(ways, first_prompts(writers["4 KB"].tokenizer, prompts, num_prompts), max_tokens, pairs)
    rows = []
    for way in kinds:
        small, large = (found[way, size] for size in writers)
        both = [f"{token_ms(each):.1f}" for each in (small, large)]
        rows.append([way, *both, spread(times_faster(small, large))])
    head = [named(model), "pages of 4 KB, ms/token", "of 2 MB", "speedup: median (range)"]
    return Found({"pages_of_weights": table_here(head, rows)}, rows)
