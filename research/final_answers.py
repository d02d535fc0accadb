"""evaluate --task gsm8k or math: the model writes answers, and the final ones are right or wrong."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.gears import RoutingSettings, routing_for
from ..cli.loaded import Loaded
from ..cli.prompt import PromptSettings, encoded
from ..cli.resolved import resolve_gears
from ..decoding.route import Route
from ..errors import GearbxError
from ..evaluation import answers
from ..evaluation.report import Report
from ..evaluation.session import EvaluationSession, hash_of_tokens
from ..gears.discovery import vocabulary
from ..gears.gearbox import model_fingerprint
from . import WRITING, EvaluateSettings, TaskSettings
from .text import about, inputs_of, note_or_raise

Problems = list[dict[str, str]]


def measured(settings: EvaluateSettings, out: Path) -> Report:
    """The report of the final answers.

    Args:
        out: directory of the session, which an interrupted run leaves for the next one.

    Raises:
        KeyboardInterrupt: before any policy was complete.
    """
    examples, problems = problems_of(settings.task)
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors)
    loaded = Loaded.of(resolved)
    resolved, ladder = loaded.resolved, loaded.resolved.ladder  # of a quantized checkpoint its own codes'
    gearbox, tokenizer = loaded.gearbox(), loaded.tokenizer
    thresholds = RoutingSettings(settings.task.thresholds)
    routing = routing_for(
        thresholds, settings.gate, ladder, vocabulary(gearbox.model), lambda: model_fingerprint(gearbox.model)
    )
    task = answers.TASKS[settings.task.task]
    modes = answers.modes_of(settings.comparison.policy or WRITING, ladder, Route(**vars(routing)))
    prompts = prompts_of(settings.prompt, settings.task.task, tokenizer, loaded.config, examples, problems)
    depends_on = answers_inputs(settings, prompts) | {"native": gearbox.kernels.native} | vars(routing)
    session = EvaluationSession(out, inputs_of(settings, resolved) | depends_on)
    attempts: dict[str, list[answers.Attempt]] = {}
    with terminal.progress_bar() as progress:
        try:
            for name, mode in modes.items():
                numbers = progress.track(range(len(prompts)), description=name)
                solve = partial(answers.solve, gearbox, tokenizer, task, prompts, mode)
                attempts[name] = session.rows(name, solve, answers.Attempt, numbers)
        except KeyboardInterrupt:
            note_or_raise(attempts, out)
    reference = next(iter(attempts))
    report = about(settings, resolved, gearbox) | {
        "complete": len(attempts) == len(modes),
        "reference": reference,
        "policies": answers.grouped(problems, answers.score(attempts, reference)),
    }
    return Report(report, answers.markdown(report), answers.COLUMNS, tuple(answers.COLUMNS))


def answers_inputs(settings: EvaluateSettings, prompts: Sequence[answers.Prompt]) -> dict[str, Any]:
    """What answers depend on besides the models."""
    task = settings.task
    return {
        "num_problems": task.num_problems,
        "num_shots": task.num_shots,
        "max_tokens": settings.prompt.max_tokens,
        "prompts": hash_of_tokens([tokens for tokens, _, _ in prompts]),
        "extra_eos_token": [*settings.model.extra_eos_token],
    }


def problems_of(task: TaskSettings) -> tuple[Problems, Problems]:
    """Examples and problems of a task's data.

    Raises:
        GearbxError: as the task's reader, or nothing left but examples.
    """
    rows = answers.TASKS[task.task].read(Path(task.data))
    examples, problems = rows[: task.num_shots], rows[task.num_shots :][: task.num_problems]
    if not problems:
        raise GearbxError(f"{task.data}: has {len(rows)} problems, all of them examples; give fewer --num-shots")
    return examples, problems


def prompts_of(
    settings: PromptSettings, task: str, tokenizer: Any, config: dict, examples: Problems, problems: Problems
) -> list[answers.Prompt]:
    """The prompt of each problem."""
    templated = tokenizer.has_chat_template and not settings.ignore_chat_template
    if templated and not examples:
        texts = [row["question"] + answers.TASKS[task].instruction for row in problems]
    else:
        texts = [answers.prompt_of(row, examples) for row in problems]
    prompts = encoded(texts, settings, tokenizer, config)
    return [(tokens, room, row["answer"]) for (tokens, room), row in zip(prompts, problems)]
