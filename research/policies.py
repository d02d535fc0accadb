"""evaluate --task text: policies along a text, each token compared with the top gear's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.resolved import Resolved, resolve_gears
from ..decoding.caches import check_heads
from ..decoding.mode import SAME
from ..errors import GearbxError
from ..errors import about as naming
from ..evaluation.answers import problem_files
from ..evaluation.policies import entries
from ..evaluation.report import COLUMNS, FIRST, Report, draw, markdown
from ..evaluation.runs import Runs
from ..evaluation.session import EvaluationSession, hash_of_tokens
from ..evaluation.text import check_windows, read_documents, windows_of
from ..files.model_directory import context_length
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..loading import fingerprint, model_name
from . import POLICIES, ComparisonSettings, EvaluateSettings


def inputs_of(settings: EvaluateSettings, resolved: Resolved) -> dict[str, Any]:
    """The inputs that every task on one model depends on."""
    return {
        "data contents": fingerprint(*problem_files(Path(settings.task.data))),
        "task": settings.task.task,
        **resolved.inputs(),
    }


def about(settings: EvaluateSettings, resolved: Resolved, gearbox: Gearbox) -> dict[str, Any]:
    """What the report of one model says of how it was made."""
    return {
        "model": model_name(settings.model.model),
        "data": settings.task.data,
        "format": resolved.format.name,
        "manage": resolved.manage,
        "group_size": resolved.group_size,
        "kernels": "native" if gearbox.kernels.native else "mlx",
    }


DEFAULT_CONTEXT = 256
PICTURE = "evaluation.png"


def measured(settings: EvaluateSettings, out: Path) -> Report:
    """The report of a text.

    Args:
        out: directory of the session, which an interrupted run leaves for the next one.

    Raises:
        KeyboardInterrupt: before any recording was complete.
    """
    comparison, data = settings.comparison, settings.task.data
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors)
    documents = read_documents(Path(data))
    loaded = Loaded.of(resolved)
    loaded.check_gears()
    resolved = loaded.resolved  # of a quantized checkpoint with the gears of its own codes
    between = parse_between(comparison.between, resolved.ladder)
    gearbox = loaded.gearbox()
    if comparison.kv_gears:
        check_heads(loaded.model, comparison.kv_gears)
    context = context_for(comparison.context, loaded.config)
    prompt_tokens, prompt_gear = parse_prompt(comparison, context, resolved.ladder)
    schedules = [resolved.ladder.schedule(schedule, "--schedule") for schedule in comparison.schedule]
    whole = windows_of(loaded.tokenizer, documents, context, comparison.tokens, data, prompt_tokens)
    check_windows(whole, loaded.model, data)
    gate = vars(settings.gate.filled())
    # Shares and policies are not among these: a report may be extended.
    depends_on = inputs_of(settings, resolved) | {
        "context": context,
        **{name: getattr(comparison, name) for name in ("tokens", "seed", "reference_dtype")},
        "between": [gear.bits for gear in between],
        **gate,
        "windows": hash_of_tokens(whole),
        "native": gearbox.kernels.native,
    }
    if prompt_tokens:
        depends_on |= {"prompt_tokens": prompt_tokens, "prompt_gear": comparison.prompt_gear}
    session = EvaluationSession(out, depends_on)
    with terminal.progress_bar() as progress:
        runs = Runs(
            session,
            gearbox,
            [window[prompt_tokens:] for window in whole],
            between,
            gate,
            comparison.seed,
            comparison.reference_dtype,
            [window[:prompt_tokens] for window in whole] if prompt_tokens else [],
            prompt_gear,
            lambda steps, total, name: progress.track(steps, total, description=name),
        )
        policies = comparison.policy or POLICIES
        rows = entries(policies, comparison.share, resolved.ladder, comparison.kv_gears or (), schedules)
        try:
            runs.compute(rows)
            complete = True
        except KeyboardInterrupt:
            note_or_raise(runs.recordings, out)
            complete = False
    report = runs.report({**about(settings, resolved, gearbox), "complete": complete, "context": context})
    return Report(report, markdown(report), COLUMNS, FIRST, {PICTURE: draw} if "noise_floor" in report else {})


def note_or_raise(done: Mapping[Any, Any], out: Path) -> None:
    """After an interrupt: raises KeyboardInterrupt again if no policy was complete."""
    if not done:
        terminal.note(f"{out}: no policy is finished; give the same command again, and it continues")
        raise KeyboardInterrupt


def parse_between(text: str | None, ladder: Ladder) -> tuple[Gear, Gear]:
    """The two gears of --between. Raises GearbxError unless the ladder has them, the lower one first."""
    if len(ladder) < 2:
        raise GearbxError(f"--gears {ladder}: one gear has nothing to be compared with; give two or more")
    if text is None:
        return ladder[0], ladder.top
    with naming("--between"):
        gears = [ladder.find(part.strip()) for part in text.split(",")]
    if len(gears) != 2 or gears[0].index >= gears[1].index:
        raise GearbxError(f"--between '{text}': give two gears, the lower one first, such as {ladder[0].bits},8")
    return gears[0], gears[1]


def parse_prompt(comparison: ComparisonSettings, context: int, ladder: Ladder) -> tuple[int, Gear | None]:
    """Tokens of a window's prompt, and the gear that reads it; None: the one that follows.

    Raises:
        GearbxError: a prompt that fills the context, a gear without a prompt or outside of the ladder.
    """
    tokens, gear = comparison.prompt_tokens, comparison.prompt_gear
    if tokens > context - 2:
        raise GearbxError(f"--prompt-tokens is {tokens}, and a window has {context}; give {context - 2} or fewer")
    if gear is not None and not tokens:
        raise GearbxError("--prompt-gear reads prompts; give --prompt-tokens too")
    with naming("--prompt-gear"):
        return tokens, None if gear == SAME else ladder.top if gear is None else ladder.find(gear)


def context_for(context: int | None, config: dict) -> int:
    """Tokens in a window: as given, else the default. Raises GearbxError for more than the model was made for."""
    longest = context_length(config)
    if context is None:
        return min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest and context > longest:
        raise GearbxError(f"--context is {context}, and the model was made for {longest}; give at most that")
    return context
