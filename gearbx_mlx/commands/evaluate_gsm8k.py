"""evaluate --task gsm8k: the model writes answers, and their final numbers are right or wrong."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.gate import RoutingSettings, routing_for
from ..cli.gearbox import require_gearbox, settle_gears
from ..cli.loaded import load_model, room_for
from ..cli.parsers.evaluate import WRITING, EvaluateSettings, TaskSettings
from ..cli.prompt import PromptSettings, encode_prompt
from ..cli.room import warn_of_memory
from ..decoding.route import Route
from ..errors import GearbxError
from ..evaluation import gsm8k
from ..evaluation.inputs import hash_of_tokens
from ..evaluation.session import Session
from ..evaluation.tables import Report
from ..evaluation.text import read_rows
from ..gears.attachment import model_fingerprint
from ..gears.output_head import vocabulary
from .evaluation_inputs import about, inputs_of

Problems = list[dict[str, str]]


def measured(settings: EvaluateSettings, out: Path) -> Report:
    """The report of the final numbers.

    Args:
        out: directory of the session, which an interrupted run leaves for the next one.

    Raises:
        KeyboardInterrupt: before any policy was complete.
    """
    examples, problems = problems_of(settings.task)
    gears = settle_gears(settings.model.model, settings.layout, settings.gears, settings.floors)
    warn_of_memory(settings.model.model, gears)
    ladder = gears.gears
    model, tokenizer, config = load_model(settings.model)
    gearbox = require_gearbox(gears, model, settings.model.model, settings.model.dtype)
    thresholds = RoutingSettings(settings.task.thresholds)
    routing = routing_for(
        thresholds, settings.gate, ladder, vocabulary(gearbox.model), lambda: model_fingerprint(gearbox.model)
    )
    modes = gsm8k.modes_of(settings.comparison.policy or WRITING, ladder, Route(**vars(routing)))
    prompts = prompts_of(settings.prompt, tokenizer, config, examples, problems)
    depends_on = answers_inputs(settings, prompts) | {"native": gearbox.kernels.native} | vars(routing)
    session = Session(out, inputs_of(settings, gears) | depends_on)
    attempts: dict[str, list[gsm8k.Attempt]] = {}
    with terminal.progress_bar() as progress:
        try:
            for name, mode in modes.items():
                numbers = progress.track(range(len(prompts)), description=name)
                solve = partial(gsm8k.solve, gearbox, tokenizer, prompts, mode)
                attempts[name] = session.rows(name, solve, gsm8k.Attempt, numbers)
        except KeyboardInterrupt:
            note_or_raise(attempts, out)
    kernels = "native" if gearbox.kernels.native else "mlx"
    reference = next(iter(attempts))
    report = about(settings, gears, kernels) | {
        "complete": len(attempts) == len(modes),
        "reference": reference,
        "policies": gsm8k.score(attempts, reference),
    }
    return Report(report, gsm8k.markdown(report), gsm8k.COLUMNS, tuple(gsm8k.COLUMNS))


def note_or_raise(attempts: dict[str, Any], out: Path) -> None:
    """After an interrupt: raises KeyboardInterrupt again if no policy was complete."""
    if not attempts:
        terminal.note(f"{out}: no policy is finished; give the same command again, and it continues")
        raise KeyboardInterrupt


def answers_inputs(settings: EvaluateSettings, prompts: Sequence[gsm8k.Prompt]) -> dict[str, Any]:
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
    """Examples and problems of a GSM8K file.

    Raises:
        GearbxError: as read_rows, or nothing left but examples.
    """
    rows = read_rows(Path(task.data), ("question", "answer"))
    examples, problems = rows[: task.num_shots], rows[task.num_shots :][: task.num_problems]
    if not problems:
        raise GearbxError(f"{task.data}: has {len(rows)} problems, all of them examples; give fewer --num-shots")
    return examples, problems


def prompts_of(
    settings: PromptSettings, tokenizer: Any, config: dict, examples: Problems, problems: Problems
) -> list[gsm8k.Prompt]:
    """The prompt of each problem."""
    templated = tokenizer.has_chat_template and not settings.ignore_chat_template
    texts = [row["question"] if templated and not examples else gsm8k.prompt_of(row, examples) for row in problems]
    tokens = [encode_prompt(settings, tokenizer, text) for text in texts]
    room = [room_for(config, len(prompt), settings.max_tokens) for prompt in tokens]
    return list(zip(tokens, room, (row["answer"] for row in problems)))
