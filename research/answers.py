"""Answers to problems: how many are correct, and their time, in one gear, in mixed gears and with two models."""

import gc
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn
import numpy as np

from gearbx_mlx import (
    Gearbox,
    Kickdown,
    Ladder,
    Lossless,
    Route,
    Static,
    batch_generator,
    calibrate,
    load,
    stream_generate,
)
from gearbx_mlx.cli.build import load_pair
from gearbx_mlx.cli.flags import ModelSettings
from gearbx_mlx.cli.prompt import room_for
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.decoding.mode import vocabulary_of
from gearbx_mlx.decoding.pair import Pair, bytes_read
from gearbx_mlx.decoding.sampling import reader_of
from gearbx_mlx.errors import GearbxError, choose
from gearbx_mlx.files.journal import Journal, JournalPart, hash_of_tokens
from gearbx_mlx.files.reading import json_lines, read_text
from gearbx_mlx.files.writing import make_directory, write_text
from gearbx_mlx.formats import get_format
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.gears.ladder import DEFAULT_GROUP_SIZE
from gearbx_mlx.routing.gates import read_thresholds
from gearbx_mlx.routing.pair import scaled
from gearbx_mlx.telemetry.agreement import wilson
from gearbx_mlx.telemetry.trace import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION, get_pyplot, save

from .evaluation import answers as tasks
from .evaluation.report import Columns, markdown_table, percent
from .evaluation.statistics import LEVEL, POWER, holm, mcnemar, power, problems_needed
from .evaluation.together import Passes, Text, Units, alternating, kicked_down, routed, together
from .lossless import shipped_base
from .real_models import MODELS as REAL_MODELS
from .studies import DATA, HELD_OUT, Found, named, study, table_here

Problems = list[dict[str, str]]
RERUN = "run the study without --only-table"
CHUNK = 50  # problems that all methods solve before the next ones: a model is loaded once in each
TIMED = 5  # problems that every method answers one at a time, in turn: seconds per token are theirs
BATCH = 16  # later answers of one gear that are generated together, with the same outputs
SEQUENCES = 24  # later answers in several gears, or with two models, that share passes
WARM_UP = 2  # tokens that each method generates, untimed, after a model is loaded
LOSS = 0.05  # of right answers, for which the number of problems is planned
SWEEP = (math.inf, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0)  # bits, EAD's Table 1; its 99 exceeds any entropy
TASK_FILES = {"gsm8k": HELD_OUT, "functions": DATA / "functions.jsonl"}

# How the weights are stored: gears and format of a gearbox.
NEAREST, SHARED, TWO, CALIBRATED, MLX_LM, PAIR = "nearest", "shared", "two", "calibrated", "mlx-lm", "pair"
GEARS = {
    NEAREST: ("4,5,6,8,16", "affine"),
    SHARED: ("4,8,16", "planes"),
    TWO: ("4,16", "planes"),
    CALIBRATED: ("4,16", "planes"),
}


@dataclass(frozen=True)
class Method:
    """A way to generate: its name in tables, how the weights are stored, and the mode; None: of two models.

    high: share of tokens in the top gear, to which thresholds are calibrated; None: the paper's thresholds. threshold:
    of two models that alternate, bits; None: the small one drafts.
    """

    label: str
    weights: str
    mode: Static | Route | Kickdown | Lossless | None = None
    high: float | None = None
    threshold: float | None = None


def one_gear(label: str, bits: int, weights: str = NEAREST) -> Method:
    return Method(label, weights, Static(str(bits), prompt_gear="same"))


REFERENCE, LOSSLESS, DRAFT = "16", "lossless", "draft-model"
METHODS = {
    REFERENCE: one_gear("16 bits", 16),
    **{str(bits): one_gear(f"{bits} bits", bits) for bits in (8, 6, 5, 4)},
    "4-prompt-16": Method("4 bits, prompt in 16 bits", NEAREST, Static("4")),
    "4-planes-prompt-16": Method("4 bits in planes, prompt in 16 bits", SHARED, Static("4")),
    "4-mlx-lm": one_gear("4 bits of mlx-lm", 4, MLX_LM),
    "4-calibrated": one_gear("4 bits, calibrated", 4, CALIBRATED),
    "route": Method("route, the paper's thresholds", SHARED, Route()),
    "route-25": Method("route, 25% in 16 bits", TWO, Route(), 0.25),
    "route-50": Method("route, 50% in 16 bits", TWO, Route(), 0.5),
    "kickdown": Method("kickdown, the paper's thresholds", SHARED, Kickdown()),
    "kickdown-25": Method("kickdown, 25% in 16 bits", TWO, Kickdown(), 0.25),
    "kickdown-50": Method("kickdown, 50% in 16 bits", TWO, Kickdown(), 0.5),
    LOSSLESS: Method("lossless", CALIBRATED, Lossless()),
    **{f"ead-{bits:g}": Method(f"two models, {bits:g} bits", PAIR, threshold=bits) for bits in SWEEP},
    DRAFT: Method("small model drafts", PAIR),
}


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    seconds: from the prompt on; None in a batch. passes: over the weights, by gear or model. top: its tokens.
    """

    text: str
    tokens: int
    seconds: float | None
    passes: list[int]
    weight_bytes: int
    top: int


@study("research/evidence.md", "docs/evidence.md", writes="images/answers.png", minutes=900)
def answers(
    model: str = "qwen-1.5b",
    small_model: str = "qwen-0.5b",
    task: Literal["gsm8k", "functions", "math"] = "gsm8k",
    problems: Path | None = None,
    out: Path = Path("answers"),
    methods: list[str] = [*METHODS],  # noqa: B006
    num_problems: int = 200,
    num_shots: int = 0,
    max_tokens: int = 256,
    only_table: bool = False,
) -> Found:
    """Measure correct answers and seconds per answer of all methods, on the same problems.

    McNemar's exact test compares each method with the 16-bit gear, and with the largest single gear that reads no more
    bytes. All methods solve 50 problems before the next 50. Each answer is saved at once, so the same command resumes
    after an interruption. A table contains the problems that all of its methods have answered.

    Args:
        model: Directory, Hub repository or name; demo: the bundled model.
        small_model: Model with the same tokenizer, for methods with two models; none: omits these methods.
        task: gsm8k: numbers. functions: Python code that passes tests, run in a sandbox. math: boxed answers.
        problems: JSON Lines; 40 held-out problems of GSM8K's training set, or 50 functions, if omitted.
        out: Directory with a file of answers for each method.
        methods: Names of methods, from METHODS of research/answers.py.
        num_problems: Maximum number of problems, from the first of the file.
        num_shots: Number of problems from the end of the file that serve as examples with answers.
        max_tokens: Maximum number of tokens in an answer.
        only_table: Generate no answers; make the tables of the saved ones.
    """
    chosen = chosen_methods(methods, small_model)
    file, kind = problems or TASK_FILES.get(task), tasks.TASKS[task]
    if file is None:
        raise GearbxError(f"--problems: needs a file for task {task}, got none; set it")
    rows, examples = split(kind.read(file), num_problems, num_shots, file)
    show_power(len(rows))
    make_directory(out)
    if not only_table:
        name = None if model == "demo" else model
        Solver(out, name, small_model, kind, rows, examples, max_tokens).solve(chosen)
    return found_in(out, kind, task, rows, chosen, max_tokens, (titled(model), titled(small_model)), file.name)


def titled(model: str) -> str:
    """Return the full name of a model of `real-models`, or the name of another."""
    name = named(model)
    return REAL_MODELS[name].title if name in REAL_MODELS else name


def chosen_methods(names: Sequence[str], small_model: str) -> list[str]:
    """Return the methods, 16 bits first. Raises GearbxError for an unknown one."""
    for name in names:
        if name not in METHODS:
            raise GearbxError(f"--methods {name}: {choose(name, METHODS)}")
    wanted = {REFERENCE, *names}
    return [name for name in METHODS if name in wanted and (small_model != "none" or METHODS[name].weights != PAIR)]


def split(rows: Problems, num_problems: int, num_shots: int, file: Path) -> tuple[Problems, Problems]:
    """Return problems and examples. Raises GearbxError for a file without problems beside the examples."""
    if num_shots >= len(rows):
        raise GearbxError(
            f"--num-shots: must be less than the {len(rows)} problems of {file}, got {num_shots}; set fewer"
        )
    kept = len(rows) - num_shots
    return rows[: min(num_problems, kept)], rows[kept:]


def show_power(problems: int) -> None:
    """Print, before the work, which losses so many problems can show."""
    print(f"{problems} problems; a loss of {LOSS:.0%} of the answers is found with probability:", flush=True)
    print(power_table(problems), flush=True)


def power_table(problems: int) -> str:
    """Return a table by the share of problems that only one of two methods solves."""
    columns: Columns = {
        "solved by one method only": lambda row: percent(row["share"], 0),
        f"probability at {problems} problems": lambda row: f"{power(problems, row['share'], LOSS):.2f}",
        f"problems for {POWER:.0%}": lambda row: needed(row["share"]),
    }
    return markdown_table(columns, [{"share": share} for share in (0.06, 0.1, 0.15, 0.2, 0.3)])


def needed(disagreement: float) -> str:
    found = problems_needed(max(disagreement, LOSS), LOSS)
    return "more than 3000" if found is None else str(found)


@dataclass(frozen=True)
class Opened:
    """A loaded model, with its gearbox or the small model beside it."""

    model: nn.Module
    tokenizer: Any
    gearbox: Gearbox | None = None
    small: nn.Module | None = None

    @property
    def gears(self) -> list[str]:
        """The names of gears or models in responses, lowest first."""
        return ["small", "large"] if self.gearbox is None else [gear.name for gear in self.gearbox.ladder]


@dataclass
class PartialAnswer:
    """An answer of a batch so far."""

    number: int
    detokenizer: Any
    text: str = ""
    tokens: int = 0

    def add(self, token: int, finish_reason: str | None) -> None:
        """Add the next token. finish_reason: as in mlx-lm's responses."""
        if finish_reason != "stop":
            self.detokenizer.add_token(token)
        if finish_reason is not None:
            self.detokenizer.finalize()
        self.text += self.detokenizer.last_segment
        self.tokens += 1


class Solver:
    """Generate the answers that are missing in a directory."""

    def __init__(
        self,
        out: Path,
        model: str | None,
        small: str,
        task: tasks.Task,
        rows: Problems,
        examples: Problems,
        max_tokens: int,
    ):
        self.out, self.model, self.small, self.task = out, model, small, task
        self.max_tokens = max_tokens
        _, tokenizer, config = load(model, lazy=True, return_config=True)
        self.prompts = prompts_of(max_tokens, task, tokenizer, config, examples, rows)

    def solve(self, methods: Sequence[str]) -> None:
        """Solve all problems in all methods, a chunk of problems at a time."""
        journals = {name: self.journal(name) for name in methods}
        numbers = range(len(self.prompts))
        missing = {name: [number for number in numbers if str(number) not in journals[name].parts] for name in methods}
        with progress_bar() as progress:
            bar = progress.add_task("answers", total=sum(map(len, missing.values())))
            for start in range(0, len(numbers), CHUNK):
                for weights in dict.fromkeys(METHODS[name].weights for name in methods):
                    work = [
                        (number, name)
                        for number in numbers[start : start + CHUNK]
                        for name in methods
                        if METHODS[name].weights == weights and number in missing[name]
                    ]
                    if not work:
                        continue
                    opened = self.opened(weights)
                    for name in dict.fromkeys(name for _, name in work):
                        self.answer(name, start, opened, WARM_UP)
                    for number, name, made in self.answered(work, opened):
                        progress.update(bar, description=f"problem {number + 1}, {METHODS[name].label}", advance=1)
                        journals[name].add(str(number), made)
                    del opened
                    gc.collect()

    def answered(self, work: Sequence[tuple[int, str]], opened: Opened) -> Iterator[tuple[int, str, Answer]]:
        """Yield the answers to these problems by these methods: one at a time in turn, then in batches."""
        of_one_gear: dict[str, list[int]] = {}
        mixed = []
        for number, name in work:
            method = METHODS[name]
            if number >= TIMED and isinstance(method.mode, Static):
                of_one_gear.setdefault(name, []).append(number)
            elif number >= TIMED and (isinstance(method.mode, Route | Kickdown) or method.threshold is not None):
                mixed.append((number, name))
            else:
                yield number, name, self.answer(name, number, opened)
        for name, numbers in of_one_gear.items():
            for number, made in self.batch(name, numbers, opened):
                yield number, name, made
        yield from self.mixed(mixed, opened)

    def batch(self, name: str, numbers: Sequence[int], opened: Opened) -> Iterator[tuple[int, Answer]]:
        """Yield the answers of one gear to these problems, as `answer` generates them, but several at a time."""
        keywords = self.keywords(METHODS[name], opened)
        gearbox = keywords["gearbox"]
        generator = batch_generator(opened.model, opened.tokenizer, completion_batch_size=BATCH, **keywords)
        prompts = [self.prompts[number] for number in numbers]
        uids = generator.insert([list(tokens) for tokens, _, _ in prompts], [room for _, room, _ in prompts])
        parts = {uid: PartialAnswer(number, opened.tokenizer.detokenizer) for uid, number in zip(uids, numbers)}
        while responses := generator.next_generated():
            for response in responses:
                if response.error is not None:
                    raise response.error
                one = parts[response.uid]
                one.add(response.token, response.finish_reason)
                if response.finish_reason is None:
                    if not self.task.finished(one.text):
                        continue
                    generator.remove([response.uid])
                passes = [one.tokens if gear == response.gear else 0 for gear in opened.gears]
                read = one.tokens * gearbox.weight_bytes_per_token(gearbox.ladder.find(response.gear))
                yield one.number, Answer(one.text, one.tokens, None, passes, read, passes[-1])

    def mixed(self, work: Sequence[tuple[int, str]], opened: Opened) -> Iterator[tuple[int, str, Answer]]:
        """Yield the answers of methods with several gears or models, as `answer` generates them, many at a time."""
        if not work:
            return
        prompts = [self.prompts[number] for number, _ in work]
        texts = [Text(tokens) for tokens, _, _ in prompts]
        parts = [PartialAnswer(number, opened.tokenizer.detokenizer) for number, _ in work]

        def is_finished(place: int, text: Text) -> bool:
            token, (_, room, _), part = text.tokens[-1], prompts[place], parts[place]
            reason = "length" if len(text.units) == room else None
            if token in opened.tokenizer.eos_token_ids:
                reason = "stop"
            part.add(token, reason)
            return reason is not None or self.task.finished(part.text)

        length = max(len(tokens) + room for tokens, room, _ in prompts)
        units, read = self.units(opened, min(SEQUENCES, len(work)), length)
        passes = [self.passes(text, METHODS[name], opened, units) for text, (_, name) in zip(texts, work)]
        for place, text, made in together(units, [*zip(texts, passes)], is_finished):
            number, name = work[place]
            weight_bytes = sum(count * each for count, each in zip(made, read))
            top = text.units.count(len(read) - 1)
            yield number, name, Answer(parts[place].text, parts[place].tokens, None, made, weight_bytes, top)

    def units(self, opened: Opened, sequences: int, length: int) -> tuple[Units, list[int]]:
        """Return the gears or models of an opened model, and the bytes of weights that a pass in each reads."""
        gearbox = opened.gearbox
        if gearbox is None:
            assert opened.small is not None
            models = [opened.small, opened.model]
            size = min(map(vocabulary, models))
            return Units(models, lambda unit: None, reader_of(), size, sequences, length), [*map(bytes_read, models)]
        ladder = gearbox.ladder
        units = Units(
            [opened.model] * len(ladder),
            lambda unit: gearbox.shift(ladder[unit]),
            reader_of(gearbox),
            vocabulary_of(gearbox),
            sequences,
            length,
        )
        return units, [gearbox.weight_bytes_per_token(gear) for gear in ladder]

    def passes(self, text: Text, method: Method, opened: Opened, units: Units) -> Passes:
        """Return the passes of a sequence by a method with several gears or models."""
        mode = self.keywords(method, opened)["mode"]
        if isinstance(mode, Pair):
            return alternating(text, mode, opened.model, units.vocab_size)
        assert opened.gearbox is not None
        return (routed if isinstance(mode, Route) else kicked_down)(text, mode, opened.gearbox, opened.tokenizer)

    def journal(self, name: str) -> Journal:
        inputs = {
            "model": named(str(self.model)),
            "prompts": hash_of_tokens([tokens for tokens, _, _ in self.prompts]),
            "max_tokens": self.max_tokens,
        }
        if METHODS[name].weights == PAIR:
            inputs["small_model"] = named(self.small)
        return Journal(self.out / f"{name}.jsonl", inputs, Answer)

    def opened(self, weights: str) -> Opened:
        """Return the model with its weights stored in one way."""
        if weights == PAIR:
            pair = load_pair(ModelSettings(self.model), self.small)
            return Opened(pair.large, pair.tokenizer, small=pair.small)
        model, tokenizer = load(self.model)
        if weights == MLX_LM:
            nn.quantize(model, DEFAULT_GROUP_SIZE, 4)
            return Opened(model, tokenizer, Gearbox(model, "4"))
        gears, format = GEARS[weights]
        base = None
        if weights == CALIBRATED:
            bits = [gear.bits for gear in Ladder.parse(gears)]
            base = shipped_base(model, tokenizer, get_format(format), bits).layers
            model, _ = load(self.model)  # shipped_base may have put gears on the other one
        return Opened(model, tokenizer, Gearbox(model, gears, format=format, base=base, keep=True))

    def answer(self, name: str, number: int, opened: Opened, most: int | None = None) -> Answer:
        """Return the answer of a method to a problem, of `most` tokens at most."""
        tokens, room, _ = self.prompts[number]
        keywords = self.keywords(METHODS[name], opened)
        started = time.perf_counter()
        responses = stream_generate(opened.model, opened.tokenizer, list(tokens), most or room, **keywords)
        taken = tasks.until_finished(self.task, responses)
        seconds = time.perf_counter() - started
        gears = opened.gears
        passes = np.zeros(len(gears), int)
        for response in taken:
            if name == DRAFT:
                passes += np.array([response.drafted, response.passes[-1]])
            else:
                passes += np.array(response.passes or [response.gear == gear for gear in gears], int)
        return Answer(
            "".join(response.text for response in taken),
            len(taken),
            seconds,
            passes.tolist(),
            sum(response.weight_bytes for response in taken),
            sum(response.gear == gears[-1] for response in taken),
        )

    def keywords(self, method: Method, opened: Opened) -> dict[str, Any]:
        """Return the method's keywords of stream_generate."""
        if method.mode is not None:
            return {"mode": self.with_thresholds(method), "gearbox": opened.gearbox}
        if method.threshold is None:
            return {"mode": Lossless(), "draft_model": opened.small}
        bits = method.threshold
        threshold = bits if math.isinf(bits) else scaled(bits, vocabulary(opened.model))
        return {"mode": Pair(opened.small, threshold=threshold)}

    def with_thresholds(self, method: Method) -> Any:
        """Return the method's mode, with thresholds from the command calibrate if it has a share."""
        if method.high is None:
            return method.mode
        assert isinstance(method.mode, Route | Kickdown)
        kind = method.mode.name
        file = self.out / f"thresholds-{kind}-{method.high:g}.json"
        if not file.exists():
            prompts, (gears, format) = self.out / "calibration.jsonl", GEARS[method.weights]
            rows = tasks.TASKS["gsm8k"].read(HELD_OUT)[-8:]
            write_text(prompts, "".join(json.dumps(row) + "\n" for row in rows))
            shares = f"{1 - method.high:g},{method.high:g}"
            how = {"prompts": str(prompts), "gears": gears, "format": format, "mode": kind, "shares": shares}
            calibrate(model=self.model, max_tokens=128, out=str(file), **how)
        return replace(method.mode, thresholds=read_thresholds(str(file)))


def prompts_of(
    max_tokens: int, task: tasks.Task, tokenizer: Any, config: dict, examples: Problems, problems: Problems
) -> Sequence[tasks.Prompt]:
    """Return the prompt of each problem, after examples; in the model's chat template, if it has one."""
    if tokenizer.has_chat_template:
        tokens = [in_turns(tokenizer, [*examples, row], task.instruction) for row in problems]
    else:
        tokens = [list(tokenizer.encode(tasks.prompt_of(row, examples))) for row in problems]
    rooms = [room_for(config, len(each), max_tokens) for each in tokens]
    return [(each, room, row["answer"]) for each, room, row in zip(tokens, rooms, problems)]


def in_turns(tokenizer: Any, rows: Problems, instruction: str) -> list[int]:
    """Return the tokens of a chat with worked answers, without notes for a calculator, before the last question."""
    messages = []
    for row in rows:
        messages += [{"role": "user", "content": row["question"] + instruction}]
        messages += [{"role": "assistant", "content": re.sub("<<.*?>>", "", tasks.worked(row))}]
    return list(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))


# Tables and picture.


def found_in(
    out: Path,
    task: tasks.Task,
    name: str,
    rows: Problems,
    methods: Sequence[str],
    max_tokens: int,
    models: tuple[str, str],
    file: str,
) -> Found:
    """Return tables and picture of the answers in a directory: each table of the problems that its methods all solved.

    Methods that take long have tables of their own, which may have fewer problems.
    """
    kept = {method: kept_answers(out / f"{method}.jsonl") for method in methods}
    (large, small), source = models, f"{file}, {max_tokens} tokens"
    tables: dict[str, str | Callable[..., str]] = {}
    scored: dict[str, list[dict[str, Any]]] = {}
    for place, members in grouped_methods(methods).items():
        numbers = sorted(set.intersection(*(set(kept[method]) for method in members)))
        if not numbers:
            raise GearbxError(f"{out}: has no problem that all of {', '.join(members)} have solved; {RERUN}")
        solved = {method: [kept[method][number] for number in numbers] for method in members}
        scored[place] = scored_rows(task, [rows[number] for number in numbers], solved, max_tokens)
        about, columns = (f"{large} and {small}", PAIR_COLUMNS) if place == "ead" else (large, COLUMNS)
        block = place if name == "gsm8k" else f"{place}_{name}"
        tables[block] = shown(f"{about}, {source}", columns, scored[place])
    first = scored["answers"]
    pictures = {}
    if name == "gsm8k":
        tables["answers_legend"] = f"{LEGEND}\n"
        tables["power"] = power_table(first[0]["problems"])
        tables["answers_sentence"] = sentence(scored, large)
        drawn = {row["policy"]: row for part in reversed(scored.values()) for row in part}
        pictures = {"answers.png": partial(draw, [*drawn.values()], f"{large}, {source}")}
    tables |= tasks.group_tables(first)
    return Found(tables, {"about": f"{large}, {source}", **scored}, pictures)


def grouped_methods(methods: Sequence[str]) -> dict[str, list[str]]:
    """Return the methods of each table; single gears are in all, to compare with."""
    singles = [name for name in methods if name.isdigit()]
    pairs = [name for name in methods if METHODS[name].weights == PAIR]
    shares = [name for name in methods if METHODS[name].high is not None]
    groups = {"answers": [name for name in methods if name not in (*pairs, *shares)]}
    if shares:
        groups["answers_shares"] = [*singles, *shares]
    if pairs:
        groups["ead"] = [*singles, *pairs]
    return groups


def scored_rows(
    task: tasks.Task, rows: Problems, solved: Mapping[str, Sequence[Answer]], max_tokens: int
) -> list[dict[str, Any]]:
    """Return a row for each method: right answers, tests against 16 bits and a single gear, seconds, bytes."""
    attempts = {
        method: [
            tasks.attempt_of(task, one.text, row["answer"], one.tokens, one.weight_bytes)
            for one, row in zip(found, rows)
        ]
        for method, found in solved.items()
    }
    scored = tasks.grouped(rows, tasks.score(attempts, REFERENCE))
    right = {method: np.array([attempt.right for attempt in tried]) for method, tried in attempts.items()}
    for row in scored:
        method, found = METHODS[row["policy"]], solved[row["policy"]]
        lost, won = (row["against_reference"][side] for side in ("only_first", "only_second"))
        row |= {
            "label": method.label,
            "threshold": method.threshold,
            "right": int(right[row["policy"]].sum()),
            "interval": wilson(int(right[row["policy"]].sum()), len(rows)),
            "disagreement": (lost + won) / len(rows),
            "seconds_per_answer": seconds_per_answer(found),
            "share_top": sum(one.top for one in found) / max(row["tokens"], 1),
            "passes": np.sum([one.passes for one in found], axis=0).tolist(),
            "cut_off": sum(one.tokens >= max_tokens for one in found),
            "equal_texts": sum(a.text == b.text for a, b in zip(found, solved[REFERENCE])),
        }
    singles = [row for row in scored if row["policy"].isdigit()]
    if "4-planes-prompt-16" in solved:  # as in mixed gears, which have these planes and read the prompt in 16 bits
        singles = [row for row in scored if row["policy"] in ("16", "8", "6", "5", "4-planes-prompt-16")]
    for row in scored:
        row["rival"] = None if row["policy"].isdigit() else against_rival(row, singles, right)
    return scored


def seconds_per_answer(found: Sequence[Answer]) -> float:
    """Return the seconds of an answer of average length, at the speed of the timed ones."""
    timed = found[:TIMED]
    seconds_per_token = sum(one.seconds or 0.0 for one in timed) / max(sum(one.tokens for one in timed), 1)
    return seconds_per_token * float(np.mean([one.tokens for one in found]))


def against_rival(
    row: Mapping[str, Any], singles: Sequence[Mapping[str, Any]], right: Mapping[str, np.ndarray]
) -> dict[str, Any] | None:
    """Return McNemar's test against the largest single gear that reads no more bytes per token; None without one."""
    most = 1.01 * row["weight_bytes_per_token"]
    cheaper = [each for each in singles if each is not row and each["weight_bytes_per_token"] <= most]
    if not cheaper:
        return None
    rival = max(cheaper, key=lambda each: each["weight_bytes_per_token"])
    return {"method": rival["label"], **mcnemar(right[rival["policy"]], right[row["policy"]])}


def rival_cell(row: Mapping[str, Any]) -> str:
    found = row["rival"]
    return "" if found is None else "{method}: {only_first}, {only_second}; {p_value:.3f}".format(**found)


COLUMNS: Columns = {
    "method": lambda row: row["label"],
    "right": lambda row: f"{row['right']} of {row['problems']}",
    "% (95% interval)": lambda row: "{:.1f} ({:.0f} to {:.0f})".format(
        100 * row["accuracy"], *(100 * end for end in row["interval"])
    ),
    "lost, won; p": lambda row: "{only_first}, {only_second}; {p_value:.3f}".format(**row["against_reference"]),
    "against one gear": rival_cell,
    "to find 5 points": lambda row: "" if row["policy"] == REFERENCE else needed(row["disagreement"]),
    "same text": lambda row: str(row["equal_texts"]),
    "MB/token": lambda row: f"{row['weight_bytes_per_token'] / 1e6:.0f}",
    "s/answer": lambda row: f"{row['seconds_per_answer']:.2f}",
    "cut off": lambda row: str(row["cut_off"]),
}
LEGEND = (
    f"lost, won: problems solved only in 16 bits, and only by this method; p: McNemar's exact test, {LEVEL} is "
    "significant. against one gear: the same against the largest single gear that reads no more bytes. to find 5 "
    f"points: problems that show such a loss with a probability of {POWER:.0%}, at this disagreement with 16 bits. "
    f"s/answer: at the method's mean length, and the speed of its first {TIMED} answers, generated one at a time."
)


def sentence(scored: Mapping[str, Sequence[Mapping[str, Any]]], models: str) -> str:
    """Return, for the page of advice, whether any method differs from 16 bits, and the picture."""
    first = scored["answers"]
    told = f"{models} solves {range_of(first)} math problems, depending on gears and mode. {decided(first)}\n"
    named = {row["policy"]: row for row in first}
    right = {name: row["right"] for name, row in named.items()}
    if {"4", "4-calibrated", "4-prompt-16", "4-planes-prompt-16", "route"} <= right.keys():
        told += (
            f"MLX's 4 bits solve {right['4']}, and those calibrated on such problems {right['4-calibrated']}. If 16 "
            f"bits read the prompt, MLX's solve {right['4-prompt-16']}, format `planes` "
            f"{right['4-planes-prompt-16']}, and `route` with these {right['route']}.\n"
        )
    if "ead" in scored:
        two = [row for row in scored["ead"] if row["threshold"] is not None]
        told += f"Two models that alternate solve {range_of(two)}. {decided(two)}\n"
    if LOSSLESS in named:
        row, seconds = named[LOSSLESS], [named[name]["seconds_per_answer"] for name in (LOSSLESS, REFERENCE)]
        told += (
            f"Mode `lossless` gave 16 bits' text in {row['equal_texts']} of {row['problems']}, "
            "in {:.1f} seconds instead of {:.1f}.\n".format(*seconds)
        )
    return f"{told}\n![Right answers over seconds per answer](images/answers.png)\n"


def range_of(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = [row["right"] for row in rows]
    low, high = min(counts), max(counts)
    return f"{low if low == high else f'{low} to {high}'} of {rows[0]['problems']}"


def decided(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which methods differ from 16 bits, by Holm's correction for the number of methods."""
    others = [row for row in rows if row["policy"] != REFERENCE]
    differs = holm([row["against_reference"]["p_value"] for row in others])
    sure = [row["label"] for row, sure in zip(others, differs) if sure]
    names = f" ({', '.join(sure)})" if 1 <= len(sure) <= 2 else ""
    return f"{len(sure) or 'None'} of {len(others)} settings{names} differ significantly from 16 bits."


PAIR_COLUMNS: Columns = {
    "entropy threshold, bits": lambda row: row["label"] if row["threshold"] is None else f"{row['threshold']:g}",
    "large model": lambda row: "" if row["threshold"] is None else percent(row["share_top"]),
    "passes, small and large": lambda row: (
        ", ".join(f"{count / row['tokens']:.2f}" for count in row["passes"]) if not row["policy"].isdigit() else ""
    ),
    **{name: COLUMNS[name] for name in COLUMNS if name not in ("method", "to find 5 points")},
}


def shown(about: str, columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table, where and when it was made."""
    cells = [[show(row) for show in columns.values()] for row in rows]
    return f"{about}: {rows[0]['problems']} problems\n\n{table_here([*columns], cells)}\n"


def kept_answers(file: Path) -> dict[int, Answer]:
    """Return the answers in a file, by the number of the problem; {} if there is none."""
    if not file.exists():
        return {}
    _, _, lines = read_text(file, "answers", RERUN).partition("\n")
    return {int(line.part): line.found for _, line in json_lines(file, lines, JournalPart[Answer], RERUN, first=2)}


FAMILIES = {  # of methods in the picture: color, markers, and whether a line joins them
    "one gear": ("0.1", "o", True),
    "other 4 bits": (ORANGE, "P*dH", False),
    "route": (SKY_BLUE, "sv^", False),
    "kickdown": (GREEN, "Dp<", False),
    "lossless": (BLUE, "h", False),
    "two models": (VERMILION, "X", True),
    "small model drafts": (PURPLE, ">", False),
}


def family_of(name: str) -> str:
    """Return the family of a method in the picture."""
    if name.isdigit() or name.startswith("4-"):
        return "one gear" if name.isdigit() else "other 4 bits"
    return {"ead": "two models", "draft": "small model drafts"}.get(name.split("-")[0], name.split("-")[0])


def draw(rows: Sequence[Mapping[str, Any]], about: str, path: Path) -> None:
    """Draw right answers with their intervals over seconds per answer; a method on fewer problems is marked."""
    most = max(row["problems"] for row in rows)
    figure, axes = get_pyplot().subplots(figsize=(9, 5.5), layout="constrained")
    for family, (color, markers, joined) in FAMILIES.items():
        members = [row for row in rows if family_of(row["policy"]) == family]
        if joined and members:
            axes.plot(*zip(*map(place_of, members)), color=color, linewidth=1, zorder=1)
        for index, row in enumerate(members):
            (x, y), (low, high) = place_of(row), row["interval"]
            errors = [[max(y - 100 * low, 0.0)], [max(100 * high - y, 0.0)]]
            fewer = f" ({row['problems']} problems)" if row["problems"] < most else ""
            label = None if joined and index else (family if joined else row["label"]) + fewer
            marker = markers[index % len(markers)]
            axes.errorbar(x, y, errors, color=color, alpha=0.35, linestyle="", zorder=2)
            axes.plot(x, y, color=color, marker=marker, markersize=8, linestyle="", label=label, zorder=3)
            if joined:
                axes.annotate(
                    row["policy"].removeprefix("ead-"), (x, y), (5, 5), textcoords="offset points", fontsize=8
                )
    axes.set(xlabel="seconds per answer", ylabel="right answers, % (95% interval)", title=about)
    axes.set_xlim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def place_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return seconds per answer, and right answers in %."""
    return row["seconds_per_answer"], 100 * row["accuracy"]
