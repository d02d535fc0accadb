"""Policies along a text, which select the gear of each token, against a random baseline and static gears.

Each token's distribution is compared with the top gear's. The control of a shifting policy is a gate that chooses at
random, with the same share of tokens, and with the same bytes.
"""

import tempfile
from functools import partial
from pathlib import Path

from rich.progress import track

from gearbx_mlx.cli.build import Loaded, decided
from gearbx_mlx.cli.decide import JustGears
from gearbx_mlx.cli.flags import GearFlags, LayerSettings, ModelSettings
from gearbx_mlx.decoding.mode import SAME
from gearbx_mlx.errors import GearbxError, choose, error_context, numbers
from gearbx_mlx.evaluation.predictions import check_windows, context_for, read_documents, windows_of
from gearbx_mlx.gears.ladder import Gear, Ladder
from gearbx_mlx.loading import model_name

from .evaluation.policies import COUNTED, entries
from .evaluation.report import COLUMNS, draw, markdown_table
from .evaluation.runs import Runs
from .studies import Found, keep_report, study


@study(minutes=30)
def policies(
    data: Path,
    out: Path = Path("evaluation"),
    model: str | None = None,
    gears: str | None = None,
    format: str | None = None,
    group_size: int | None = None,
    manage: str | None = None,
    kernels: str = "auto",
    activations: str = "int16",
    policy: list[str] = [],  # noqa: B006
    share: str = "0.25,0.5",
    between: str | None = None,
    context: int | None = None,
    tokens: int = 2000,
    prompt_tokens: int = 0,
    prompt_gear: str | None = None,
    seed: int = 0,
) -> Found:
    """Compare policies along a text, token by token on a KV cache, with a random baseline and static gears.

    static, random: the controls, in every report. route: GEARBX's gate on past tokens, two tokens late. kickdown: a
    token is computed again if its entropy in the low gear is above the threshold; inverted: if it is below. oracle:
    if its true KL is above, which is unknown in practice. lossless: the low gear drafts, the top gear verifies.
    Thresholds are the quantiles that result in the share of tokens.

    Args:
        data: Text, or JSON Lines with text, or with question and answer (GSM8K); each line is a window.
        out: Directory for evaluation.json and evaluation.png.
        model: Directory or Hub repository; the bundled model if omitted.
        policy: Names of policies; all if omitted.
        share: Shares of tokens in the higher gear.
        between: The two gears of shifting policies; the lowest and the top one if omitted.
        context: Tokens in a window; 256, or the model's context if shorter.
        tokens: Total number of predictions.
        prompt_tokens: Tokens at the start of a window that are prefilled and not predicted.
        prompt_gear: Prefill gear: name, bits, or same (the gear that follows); the top gear if omitted.
        seed: Seed of the random gate and of the noise.
    """
    for name in policy:
        if name not in COUNTED:
            raise GearbxError(f"--policy {name}: there is none; {choose(name, COUNTED)}")
    ladder = None if gears is None else Ladder.parse(gears)
    layout = LayerSettings(gears=ladder, format=format, manage=manage, q_group_size=group_size)
    settings = JustGears(ModelSettings(model), layout, GearFlags(kernels=f"{kernels}:{activations}"))
    documents = read_documents(data)
    loaded = Loaded.of(decided(settings))
    loaded.check_gears()
    gearbox, ladder = loaded.gearbox(), loaded.decision.ladder
    pair, window = parse_between(between, ladder), context_for(context, loaded.config)
    of_prompt = parse_prompt(prompt_tokens, prompt_gear, window, ladder)
    whole = windows_of(loaded.tokenizer, documents, window, tokens, str(data), prompt_tokens)
    check_windows(whole, loaded.model, str(data))
    shares = tuple(sorted({*numbers("--share", share, float, "0.25,0.5")}))
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(
            Path(folder),
            gearbox,
            [each[prompt_tokens:] for each in whole],
            pair,
            seed,
            [each[:prompt_tokens] for each in whole] if prompt_tokens else [],
            of_prompt,
            lambda steps, total, name: track(steps, name, total),
        )
        runs.compute(entries(policy or [*COUNTED], shares, ladder))
        report = runs.report(
            {
                "model": model_name(model),
                "data": str(data),
                "format": loaded.decision.format.name,
                "manage": loaded.decision.stored.manage,
                "group_size": loaded.decision.stored.group_size,
                "kernels": "native" if gearbox.kernels.native else "mlx",
                "context": window,
            }
        )
    keep_report(out, report, {"evaluation.png": partial(draw, report)})
    return Found({"policies": markdown_table(COLUMNS, report["policies"])}, report)


def parse_between(text: str | None, ladder: Ladder) -> tuple[Gear, Gear]:
    """Return the two gears of --between. Raises GearbxError unless the ladder has them, the lower one first."""
    if len(ladder) < 2:
        raise GearbxError(f"--gears {ladder}: one gear has nothing to be compared with; give two or more")
    if text is None:
        return ladder[0], ladder.top
    with error_context("--between"):
        gears = [ladder.find(part.strip()) for part in text.split(",")]
    if len(gears) != 2 or gears[0].index >= gears[1].index:
        raise GearbxError(f"--between '{text}': give two gears, the lower one first, such as {ladder[0].bits},8")
    return gears[0], gears[1]


def parse_prompt(tokens: int, gear: str | None, context: int, ladder: Ladder) -> Gear | None:
    """Return the gear that reads a window's prompt; None: the one that follows.

    Raises:
        GearbxError: a prompt that fills the context, a gear without a prompt or outside of the ladder.
    """
    if tokens > context - 2:
        raise GearbxError(f"--prompt-tokens is {tokens}, and a window has {context}; give {context - 2} or fewer")
    if gear is not None and not tokens:
        raise GearbxError("--prompt-gear reads prompts; give --prompt-tokens too")
    with error_context("--prompt-gear"):
        return None if gear == SAME else ladder.top if gear is None else ladder.find(gear)
