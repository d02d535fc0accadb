"""calibrate --target-agreement, --target-kl, --target-bytes: the policy that meets a wish at the least cost."""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import Progress

from . import options, terminal
from .errors import GearbxError
from .evaluation.budget import KICKDOWN, LOSSLESS, STATIC, Candidate, Outcome, Wish, candidates, in_order
from .evaluation.drafting import drafted
from .evaluation.metrics import entropy_bits, log_softmax
from .evaluation.policies import SameToken, Static
from .evaluation.replay import Reference, Step, driven, read_at_once, record, targets_of
from .evaluation.report import Costs
from .evaluation.text import read_documents, windows_of
from .gears.discovery import vocabulary
from .gears.gearbox import Gearbox
from .gears.ladder import Ladder
from .loading import model_name
from .routing.acceptance import ProductRule
from .routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION
from .routing.monitor import DEFAULT_WINDOW
from .routing.thresholds import ThresholdFile
from .telemetry.files import write_text

MODEST = 1.02  # the next candidate after one that fell short reads so many times as much, or as little
DEFAULT_GEARS = "4,5,6,8,16"
KINDS = ("agreement", "kl", "bytes")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a budget instead of thresholds")
    wish = group.add_mutually_exclusive_group()
    wish.add_argument("--target-agreement", type=float, help="Least share of tokens on which the top gear agrees.")
    wish.add_argument("--target-kl", type=float, help="Most mean KL from the top gear, nats.")
    wish.add_argument("--target-bytes", type=float, help="Most weight bytes read per token.")
    group.add_argument("--data", help="Text to calibrate on. Default: what the top gear writes after the prompts.")
    group.add_argument("--tokens", type=int, default=2000, help="Tokens of it. Default: 2000")
    group.add_argument("--context", type=int, default=256, help="Tokens in a window of it. Default: 256")


def wish_of(args: argparse.Namespace) -> Wish | None:
    """Raises GearbxError for a wish that makes no sense."""
    given = {name: getattr(args, f"target_{name}") for name in KINDS}
    if all(value is None for value in given.values()):
        return None
    return Wish(agreement=given["agreement"], kl=given["kl"], weight_bytes=given["bytes"])


def run(args: argparse.Namespace, wish: Wish, prompts: list[str]) -> int:
    """Record each gear, choose, verify, write."""
    ladder = Ladder.parse(args.gears or DEFAULT_GEARS)
    out = options.output_path(args.out or "policy.json")
    documents = read_documents(Path(args.data)) if args.data else None
    model, tokenizer, config = options.load_model(args)
    gearbox = geared(args, model, ladder)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=terminal.messages, transient=True) as progress,
    ):
        if documents is None:
            texts = written(args, prompts, gearbox, tokenizer, config, progress)
            windows = [text[: args.context] for text in texts]
        else:
            windows = windows_of(tokenizer, documents, args.context, args.tokens, args.data)
        reference = reference_of(gearbox, windows, Path(folder), progress)
        recordings = {}
        for gear in ladder:
            steps = progress.track(
                read_at_once(gearbox, windows, gear), len(reference.nll), description=f"{gear.bits} bits"
            )
            recordings[gear] = record(steps, reference)
        found = candidates(recordings, gearbox.weight_bytes_in)
        chosen, verified = first_that_keeps(args, in_order(found, wish), wish, windows, reference, progress)
    write_text(out, content_of(args, chosen, verified, wish, vocabulary(model), len(reference.nll)))
    tell(chosen, verified, best_static(found, wish), wish)
    print(f"{out}: {chosen}")
    return 0


def geared(args: argparse.Namespace, model: Any, ladder: Ladder) -> Gearbox:
    """Raises GearbxError for a model without gears."""
    gearbox = options.make_gearbox(args, model, ladder)
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(f"{model_name(args.model)}: is quantized already and has no gears to choose from")
    return gearbox


def written(
    args: argparse.Namespace, prompts: list[str], gearbox: Gearbox, tokenizer: Any, config: dict, progress: Any
) -> list[list[int]]:
    """The prompts, each with what the top gear writes after it, greedily; tokens."""
    from .decoding.stream import stream_generate
    from .routing.gates import Held

    texts = []
    for prompt in progress.track(prompts, description="text"):
        tokens = options.encode_prompt(args, tokenizer, prompt)
        length = options.room_for(config, len(tokens), args.max_tokens)
        top = gearbox.ladder.top.name
        responses = stream_generate(
            gearbox.model, tokenizer, tokens, length, gearbox=gearbox, gate=Held(), initial_gear=top
        )
        texts.append([*tokens, *(response.token for response in responses)])
    return texts


def reference_of(gearbox: Gearbox, windows: list[list[int]], folder: Path, progress: Any) -> Reference:
    """The top gear's log-probabilities."""
    targets = targets_of(windows)
    steps = progress.track(read_at_once(gearbox, windows, gearbox.ladder.top), len(targets), description="the top gear")
    Reference.write(folder / "reference.npy", steps, len(targets), "float32")
    return Reference(folder / "reference.npy", targets)


def first_that_keeps(
    args: argparse.Namespace,
    meeting: list[Candidate],
    wish: Wish,
    windows: list[list[int]],
    reference: Reference,
    progress: Any,
) -> tuple[Candidate, Outcome]:
    """The best candidate that keeps in a sequential run what was predicted of it, and what it came to.

    Raises:
        GearbxError: none does.
    """
    least, most = 0.0, math.inf
    for candidate in meeting:
        if not least <= candidate.predicted.weight_bytes <= most:
            continue  # hardly another one than that which fell short
        outcome = verified_outcome(args, candidate, windows, reference, progress)
        if wish.met_by(outcome):
            return candidate, outcome
        terminal.note(f"{candidate}: predicted to meet {wish}, and in a sequential run does not ({shown(outcome)})")
        if wish.weight_bytes is None:
            least = candidate.predicted.weight_bytes * MODEST
        else:
            most = candidate.predicted.weight_bytes / MODEST
    raise GearbxError(f"nothing that was predicted to meet {wish} does so in a sequential run; allow more")


def verified_outcome(
    args: argparse.Namespace, candidate: Candidate, windows: list[list[int]], reference: Reference, progress: Any
) -> Outcome:
    """A candidate in a gearbox of its own, one token at a time on a KV cache that keeps what low gears wrote."""
    model, _, _ = options.load_model(args)
    gearbox = geared(args, model, Ladder(candidate.gears))
    steps = steps_of(gearbox, candidate, windows)
    recording = record(progress.track(steps, len(reference.nll), description=f"verify {candidate}"), reference)
    read = Costs(gearbox).weight_bytes(recording)
    return Outcome(float(recording.agree.mean()), float(recording.kl.mean()), read)


def steps_of(gearbox: Gearbox, candidate: Candidate, windows: list[list[int]]) -> Iterator[Step]:
    low, high = gearbox.ladder[0], gearbox.ladder.top
    if candidate.mode == KICKDOWN:
        threshold = candidate.thresholds[0]
        policy = SameToken(low, high, lambda place, q: float(entropy_bits(log_softmax(q))), threshold)
        return driven(gearbox, windows, policy)
    if candidate.mode == LOSSLESS and candidate.curve and candidate.bound:
        return drafted(gearbox, windows, low, high, ProductRule(candidate.curve, candidate.bound))
    return driven(gearbox, windows, Static(low))


def best_static(found: list[Candidate], wish: Wish) -> Candidate | None:
    """The best static gear that meets the wish, if any does."""
    static = [c for c in found if c.mode == STATIC and wish.met_by(c.predicted)]
    return min(static, key=lambda c: wish.rank(c.predicted), default=None)


def tell(chosen: Candidate, outcome: Outcome, static: Candidate | None, wish: Wish) -> None:
    """Say what was chosen, and what a static gear would come to."""
    terminal.note(f"{chosen} meets {wish} on {shown(outcome)} (verified; predicted {shown(chosen.predicted)})")
    if chosen.mode == STATIC:
        terminal.note("a static gear is better here than any way of shifting: use it alone")
    elif static is None:
        terminal.note("no static gear of this ladder meets it")
    else:
        terminal.note(
            f"the best static gear that meets it, {static}, is predicted to come to {shown(static.predicted)}"
        )


def shown(outcome: Outcome) -> str:
    return (
        f"agreement {outcome.agreement:.4f}, mean KL {outcome.kl_mean:.3g}, "
        f"{terminal.human_bytes(outcome.weight_bytes)} of weights per token"
    )


def content_of(
    args: argparse.Namespace, chosen: Candidate, outcome: Outcome, wish: Wish, vocab_size: int, tokens: int
) -> str:
    """The thresholds file, with the mode and what it was chosen for."""
    file = ThresholdFile(
        thresholds=list(chosen.thresholds),
        vocab_size=vocab_size,
        model=model_name(args.model),
        method=str(wish),
        gears=list(chosen.gears),
        tokens=tokens,
        window=DEFAULT_WINDOW,
        hysteresis=DEFAULT_HYSTERESIS,
        min_gear_duration=DEFAULT_MIN_GEAR_DURATION,
    )
    further: dict[str, Any] = {"mode": chosen.mode, "predicted": vars(chosen.predicted), "verified": vars(outcome)}
    if chosen.curve:
        further |= {"curve": vars(chosen.curve), "bound": chosen.bound}
    return json.dumps(json.loads(file.text()) | further, indent=2) + "\n"
