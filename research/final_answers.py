"""Problems of GSM8K or MATH, which a model solves by writing: what each way to write is worth in right answers."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn

from gearbx_mlx import Gearbox, Kickdown, Ladder, Route, Static, load
from gearbx_mlx.cli.prompt import room_for
from gearbx_mlx.decoding.caches import in_common
from gearbx_mlx.decoding.mode import thresholds_for
from gearbx_mlx.errors import GearbxError, choose
from gearbx_mlx.files.journal import Journal, JournalPart, hash_of_tokens
from gearbx_mlx.files.reading import json_lines, read_text
from gearbx_mlx.files.writing import make_directory
from gearbx_mlx.formats import get_format
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.gears.ladder import DEFAULT_GROUP_SIZE, Gear
from gearbx_mlx.routing.calibration import kickdown_thresholds, share_thresholds
from gearbx_mlx.telemetry.trace import GREEN, ORANGE, SKY_BLUE, get_pyplot, save

from .evaluation import answers
from .evaluation.report import Columns, markdown_table, percent
from .evaluation.together import Climbing, Shifting, Text, read_prompt, write_together
from .lossless import shipped_base
from .studies import Found, study

Problems = list[dict[str, str]]
Mode = Static | Route | Kickdown
GIVE = "run the study without --only-table"
TOGETHER = 16  # texts in a pass: as many as native kernels take
THRESHOLDS = 8  # problems at the end of the file that calibrate thresholds, and are not scored
NEAREST, SHARED, CALIBRATED, MLX_LM = "nearest", "shared", "calibrated", "mlx-lm"  # how the weights are stored
GEARBOXES = {NEAREST: ("4,5,6,8,16", "affine"), SHARED: ("4,8,16", "planes"), CALIBRATED: ("4,16", "planes")}


@dataclass(frozen=True)
class Way:
    """A way to write: what a table calls it, how the weights are stored, and the mode.

    shares: of tokens in each gear, to which the thresholds of the mode are calibrated; none: they are the paper's.
    """

    label: str
    stored: str
    mode: Mode
    shares: tuple[float, ...] = ()


# The shares read as much as a gear of 5 or of 6 bits does: 0.8 x 4.5 + 0.17 x 8.5 + 0.03 x 16 = 5.5 bits per weight,
# and where kickdown computes a token again, both passes count.
WAYS = {
    "16": Way("16 bits, and lossless", NEAREST, Static("16")),
    "8": Way("8 bits", NEAREST, Static("8", prompt_gear="same")),
    "6": Way("6 bits", NEAREST, Static("6", prompt_gear="same")),
    "5": Way("5 bits", NEAREST, Static("5", prompt_gear="same")),
    "4": Way("4 bits", NEAREST, Static("4", prompt_gear="same")),
    "4-mlx-lm": Way("4 bits of mlx-lm", MLX_LM, Static("4", prompt_gear="same")),
    "4-calibrated": Way("4 bits, calibrated", CALIBRATED, Static("4", prompt_gear="same")),
    "prompt-16": Way("4 bits, prompt in 16", NEAREST, Static("4", prompt_gear="16")),
    "route": Way("route, the paper's thresholds", SHARED, Route()),
    "route-5": Way("route, for the bytes of 5 bits", SHARED, Route(), (0.8, 0.17, 0.03)),
    "route-6": Way("route, for the bytes of 6 bits", SHARED, Route(), (0.61, 0.33, 0.06)),
    "kickdown": Way("kickdown, the paper's thresholds", SHARED, Kickdown()),
    "kickdown-6": Way("kickdown, for the bytes of 6 bits", SHARED, Kickdown(), (0.8, 0.18, 0.02)),
}


@dataclass(frozen=True)
class Answer:
    """A written answer. passes: over the weights, in each gear. weight_bytes: that these passes read."""

    text: str
    tokens: int
    passes: list[int]
    weight_bytes: int


@study("docs/evidence.md", writes="images/final_answers.png", minutes=600)
def final_answers(
    problems: Path,
    out: Path = Path("answers"),
    model: str | None = None,
    task: Literal["gsm8k", "math"] = "gsm8k",
    ways: list[str] = [*WAYS],  # noqa: B006
    num_problems: int = 50,
    num_shots: int = 4,
    max_tokens: int = 256,
    only_table: bool = False,
) -> Found:
    """Right answers of one gear, route, kickdown and more, paired with those of 16 bits: McNemar's exact test.

    The model writes greedily, in its chat template. Mode lossless writes what 16 bits write, by definition, and is not
    run. Every answer is kept at once; the same command goes on where it ended, and several commands may share a
    directory if their ways differ. The table has the problems that all ways have solved.

    Args:
        problems: JSON Lines with question and answer (GSM8K), or of MATH: JSON Lines or a folder of JSON files.
        out: Directory with a file of answers for each way.
        model: A directory or a Hub repository; the model that ships if not given.
        ways: Of the table: 16, 8, 6, 5, 4, 4-mlx-lm, 4-calibrated, prompt-16, route, route-5, route-6, kickdown,
            kickdown-6.
        num_problems: Problems to solve, the first of the file.
        num_shots: Problems at the end of the file that are shown as examples, with their answers.
        max_tokens: Of an answer. Solutions of MATH are long: give 512 or more.
        only_table: Write nothing new: make the table of what is there.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise GearbxError(f"--ways {unknown[0]}: {choose(unknown[0], WAYS)}")
    make_directory(out)
    rows = answers.TASKS[task].read(problems)
    unscored = num_shots + (THRESHOLDS if any(WAYS[way].shares for way in ways) else 0)
    if num_problems + unscored > len(rows):
        raise GearbxError(
            f"--num-problems {num_problems}: {problems} has {len(rows)}, of which the last {unscored} are examples or "
            f"find thresholds; give at most {max(len(rows) - unscored, 0)}"
        )
    rows, examples = rows[: len(rows) - num_shots], rows[len(rows) - num_shots :]
    if not only_table:
        Solver(out, model, task, examples, rows, max_tokens).solve(ways, num_problems)
    return found_in(out, answers.TASKS[task], rows, ways, max_tokens)


class Solver:
    """Write the answers that are missing in a directory."""

    def __init__(self, out: Path, model: str | None, task: str, examples: Problems, rows: Problems, max_tokens: int):
        self.out, self.model, self.most = out, model, max_tokens
        _, self.tokenizer, config = load(model, lazy=True, return_config=True)
        self.prompts = prompts_of(max_tokens, task, self.tokenizer, config, examples, rows)
        unread = [tokens[:-1] for tokens, _, _ in self.prompts]
        self.beginning = unread[0][: min(in_common(unread[0], each) for each in unread)]
        self.gearbox = cache(partial(gearbox_of, model))
        self.begun = cache(self.read_beginning)

    def solve(self, ways: Sequence[str], num_problems: int) -> None:
        """Solve problems, as many at a time as share a pass, in all ways before the next ones."""
        journals = {way: self.journal(way, Answer) for way in ways}
        wanted = range(len(self.prompts))[:num_problems]
        for start in range(0, len(wanted), TOGETHER):
            numbers = wanted[start : start + TOGETHER]
            read = cache(self.read)
            for way in ways:
                missing = [number for number in numbers if str(number) not in journals[way].parts]
                if missing:
                    for number, answer in zip(missing, self.answers(way, missing, read)):
                        journals[way].add(str(number), answer)
                    print(f"{way}: {len(journals[way].parts)} problems", flush=True)

    def journal(self, name: str, found: Any) -> Journal:
        about = {
            "model": str(self.model),
            "prompts": hash_of_tokens([tokens for tokens, _, _ in self.prompts]),
            "max_tokens": self.most,
        }
        return Journal(self.out / f"{name}.jsonl", about, found)

    def read(self, stored: str, number: int, gear: Gear) -> list[Any]:
        """Return the KV cache of a prompt but for its last token, read in a gear."""
        tokens, begun = self.prompts[number][0], self.begun(stored, gear)
        return read_prompt(self.gearbox(stored), tokens[len(self.beginning) : -1], gear, begun)

    def read_beginning(self, stored: str, gear: Gear) -> list[Any]:
        """Return the KV cache of what all prompts begin with."""
        return read_prompt(self.gearbox(stored), self.beginning, gear)

    def answers(self, way: str, numbers: Sequence[int], read: Callable[..., list[Any]]) -> Iterator[Answer]:
        """Yield the answers of one way to some problems, written together."""
        stored, gearbox = WAYS[way].stored, self.gearbox(WAYS[way].stored)
        mode = self.settled(way)
        choosers, caches = [], []
        for number in numbers:
            chooser, reads = chooser_of(mode, gearbox, self.tokenizer, self.prompts[number][0])
            choosers.append(chooser)
            caches.append(read(stored, number, reads))
        costs = [gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder]
        for text in self.write(gearbox, numbers, caches, choosers):
            read_bytes = sum(count * cost for count, cost in zip(text.passes, costs))
            yield Answer(self.tokenizer.decode(text.tokens), len(text.tokens), text.passes, read_bytes)

    def write(self, gearbox: Gearbox, numbers: Sequence[int], caches: list, choosers: list) -> list[Text]:
        prompts = [self.prompts[number][0] for number in numbers]
        most = min(self.prompts[number][1] for number in numbers)
        return write_together(gearbox, prompts, caches, choosers, most, set(self.tokenizer.eos_token_ids))

    def settled(self, way: str) -> Mode:
        """Return the mode of a way, with its thresholds."""
        mode, shares = WAYS[way].mode, WAYS[way].shares
        if not shares:
            return mode
        texts = self.climbed
        if isinstance(mode, Kickdown):
            thresholds, _ = kickdown_thresholds([bits for text in texts for bits in text], shares)
            return replace(mode, thresholds=thresholds)
        assert isinstance(mode, Route)
        top = [[bits[-1] for bits in text] for text in texts]
        thresholds, _ = share_thresholds(top, shares, vocabulary(self.gearbox(SHARED).model))
        return replace(mode, thresholds=thresholds)

    @cached_property
    def climbed(self) -> list[list[list[float]]]:
        """Entropies, bits: of every token of the texts that calibrate thresholds, in each gear.

        They are the top gear's texts, of problems that are not scored: as of the command calibrate.
        """
        journal, gearbox = self.journal("thresholds", list[list[float]]), self.gearbox(SHARED)
        numbers = range(len(self.prompts) - THRESHOLDS, len(self.prompts))
        missing = [number for number in numbers if str(number) not in journal.parts]
        caches = [self.read(SHARED, number, gearbox.ladder.top) for number in missing]
        choosers = [Climbing(gearbox, (-1.0,) * (len(gearbox.ladder) - 1)) for _ in missing]
        for number, text in zip(missing, self.write(gearbox, missing, caches, choosers) if missing else ()):
            journal.add(str(number), text.entropies)
        return [journal.parts[str(number)] for number in numbers]


def gearbox_of(name: str | None, stored: str) -> Gearbox:
    """Return a model in gears, with native kernels: in these a text is the same in any company."""
    model, tokenizer = load(name)
    if stored == MLX_LM:
        nn.quantize(model, DEFAULT_GROUP_SIZE, 4)
        return Gearbox(model, "4", kernels="native")
    ladder, format = GEARBOXES[stored]
    base = None
    if stored == CALIBRATED:
        base = shipped_base(model, tokenizer, get_format(format), [gear.bits for gear in Ladder.parse(ladder)]).layers
        model, _ = load(name)  # answers put gears on the other one
    return Gearbox(model, ladder, format=format, kernels="native", base=base)


def chooser_of(mode: Mode, gearbox: Gearbox, tokenizer: Any, prompt: Sequence[int]) -> tuple[Shifting | Climbing, Gear]:
    """Return what chooses the gears of a text, and the gear that reads its prompt."""
    if isinstance(mode, Kickdown):
        chooser = Climbing(gearbox, thresholds_for(mode.thresholds, gearbox))
        return chooser, mode.gears_of_text(gearbox)[0]
    text = mode.sequence(gearbox, tokenizer, prompt)
    return Shifting(gearbox, text), text.prompt_gear


COLUMNS: Columns = {
    "method": lambda row: row["label"],
    "right": lambda row: f"{round(row['accuracy'] * row['problems'])} of {row['problems']}",
    "%": lambda row: f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f}",
    "lost, won": lambda row: "{only_first}, {only_second}".format(**row["against_reference"]),
    "p": lambda row: f"{row['against_reference']['p_value']:.2f}",
    "kept": lambda row: percent(row["kept_of_reference"]),
    "same answer": lambda row: percent(row["same_answer_as_reference"]),
    "MB/token": lambda row: f"{row['weight_bytes_per_token'] / 1e6:.0f}",
    "cut off": lambda row: str(row["cut_off"]),
}


def found_in(out: Path, task: answers.Task, rows: Problems, ways: Sequence[str], most: int) -> Found:
    """Return the table and the picture of the answers in a directory, of the problems that all ways have solved.

    most: tokens of an answer, at which it is cut off.
    """
    kept = {way: kept_answers(out / f"{way}.jsonl") for way in ways}
    numbers = sorted(set.intersection(*map(set, kept.values())))
    if not numbers:
        raise GearbxError(f"{out}: has no problem that all ways have solved; {GIVE}")
    attempts = {
        way: [judged(task, found[number], rows[number]["answer"]) for number in numbers] for way, found in kept.items()
    }
    scored = answers.grouped([rows[number] for number in numbers], answers.score(attempts, ways[0]))
    for row in scored:
        found = [kept[row["policy"]][number] for number in numbers]
        row |= {"label": WAYS[row["policy"]].label, "cut_off": sum(answer.tokens == most for answer in found)}
    tables = {"final_answers": markdown_table(COLUMNS, scored), **answers.group_tables(scored)}
    return Found(tables, {"policies": scored}, {"final_answers.png": partial(draw, scored)})


STYLES = {"route": (SKY_BLUE, "sv^"), "kickdown": (GREEN, "Dp"), "static": (ORANGE, "*PX")}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw right answers over bytes: a line through the gears of the nearest codes, and a marker for each other way."""
    figure, axes = get_pyplot().subplots(figsize=(8, 5), layout="constrained")
    line = sorted(point_of(row) for row in rows if row["policy"].isdigit())
    axes.errorbar(*zip(*line), color="0.1", marker="|", capsize=3, linewidth=1.2, label="one gear, nearest codes")
    markers = {mode: iter(shapes) for mode, (_, shapes) in STYLES.items()}
    for row in rows:
        way = WAYS[row["policy"]]
        x, y, error = point_of(row)
        if row["policy"].isdigit():
            axes.annotate(row["policy"], (x, y), (5, 5), textcoords="offset points")
            continue
        color, marker = STYLES[way.mode.name][0], next(markers[way.mode.name])
        axes.errorbar(x, y, error, color=color, alpha=0.4, linestyle="")
        axes.plot(x, y, color=color, marker=marker, markersize=9, linestyle="", label=way.label)
    axes.set(
        xlabel="weight bytes per token, MB",
        ylabel="right answers, %, and standard error",
        title=f"{rows[0]['problems']} problems",
    )
    axes.set_xlim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def point_of(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return MB per token, right answers and their standard error, both in %."""
    return row["weight_bytes_per_token"] / 1e6, 100 * row["accuracy"], 100 * row["standard_error"]


def kept_answers(file: Path) -> dict[int, Answer]:
    """Return the answers in a file, by the number of the problem; {} where there is none."""
    if not file.exists():
        return {}
    _, _, lines = read_text(file, "answers", GIVE).partition("\n")
    return {int(line.part): line.found for _, line in json_lines(file, lines, JournalPart[Answer], GIVE, first=2)}


def judged(task: answers.Task, found: Answer, answer: str) -> answers.Attempt:
    return answers.attempt_of(task, found.text, answer, found.tokens, found.weight_bytes)


def problems_of(data: Path, task: str, num_shots: int, num_problems: int) -> tuple[Problems, Problems]:
    """Examples and problems.

    Raises:
        GearbxError: as the task's reader, or nothing left but examples.
    """
    rows = answers.TASKS[task].read(data)
    examples, problems = rows[:num_shots], rows[num_shots:][:num_problems]
    if not problems:
        raise GearbxError(f"{data}: has {len(rows)} problems, all of them examples; give fewer --num-shots")
    return examples, problems


def prompts_of(
    max_tokens: int, task: str, tokenizer: Any, config: dict, examples: Problems, problems: Problems
) -> Sequence[answers.Prompt]:
    """The prompt of each problem, after examples; in the model's chat template, if it has one."""
    instruction = answers.TASKS[task].instruction
    if tokenizer.has_chat_template:
        tokens = [in_turns(tokenizer, [*examples, row], instruction) for row in problems]
    else:
        tokens = [list(tokenizer.encode(answers.prompt_of(row, examples))) for row in problems]
    rooms = [room_for(config, len(each), max_tokens) for each in tokens]
    return [(each, room, row["answer"]) for each, room, row in zip(tokens, rooms, problems)]


def in_turns(tokenizer: Any, rows: Problems, instruction: str) -> list[int]:
    """The tokens of a chat: each question but the last with its worked answer, without notes for a calculator."""
    messages = []
    for row in rows:
        messages += [{"role": "user", "content": row["question"] + instruction}]
        messages += [{"role": "assistant", "content": re.sub("<<.*?>>", "", row["answer"])}]
    return list(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))
