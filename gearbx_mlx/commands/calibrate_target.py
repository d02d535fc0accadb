"""calibrate --target-agreement, --target-kl, --target-bytes: the policy that meets a wish at the least cost."""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from rich.progress import Progress

from ..cli import gears as options_gears
from ..cli import options, terminal
from ..decoding.agreement import Agreement, draft_files
from ..errors import GearbxError
from ..evaluation.budget import KICKDOWN, LOSSLESS, STATIC, Candidate, Outcome, Wish, candidates, in_order
from ..evaluation.drafting import drafted, sequences_of
from ..evaluation.metrics import entropy_of_logprobs, log_softmax
from ..evaluation.policies import SameToken, Static
from ..evaluation.replay import Recording, Reference, Step, driven, read_at_once, record, targets_of
from ..evaluation.report import Costs
from ..evaluation.text import read_documents, windows_of
from ..files.writing import write_text
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from ..loading import model_name
from ..routing.draft_file import DraftFile
from ..routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION
from ..routing.monitor import DEFAULT_WINDOW
from ..routing.thresholds import ThresholdFile
from ..telemetry.summary import as_json

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
    options_gears.settle_gears(args, DEFAULT_GEARS)
    ladder = Ladder.parse(args.gears)
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
        found = candidates(recordings, lambda ladder, gear: gearbox.costed_in(ladder).weight_bytes_per_token(gear))
        by_bits = {gear.bits: recording for gear, recording in recordings.items()}
        chosen, verified, file = first_that_keeps(
            args, in_order(found, wish), wish, windows, by_bits, reference, progress
        )
    file |= {"wish": str(wish), "predicted": vars(chosen.predicted), "verified": vars(verified)}
    write_text(out, as_json(file))
    tell(chosen, verified, best_static(found, wish), wish)
    print(f"{out}: {chosen}")
    return 0


def geared(args: argparse.Namespace, model: Any, ladder: Ladder) -> Gearbox:
    """Raises GearbxError for a model without gears."""
    gearbox = options_gears.make_gearbox(args, model, ladder)
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(f"{model_name(args.model)}: is quantized already and has no gears to choose from")
    return gearbox


def written(
    args: argparse.Namespace, prompts: list[str], gearbox: Gearbox, tokenizer: Any, config: dict, progress: Any
) -> list[list[int]]:
    """The prompts, each with what the top gear writes after it, greedily; tokens."""
    from ..decoding.stream import stream_generate
    from ..routing.gates import Held

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
    recordings: dict[int, Recording],
    reference: Reference,
    progress: Any,
) -> tuple[Candidate, Outcome, dict[str, Any]]:
    """The best candidate that keeps in a sequential run what was predicted of it, what it came to, and its file.

    Raises:
        GearbxError: none does.
    """
    least, most = 0.0, math.inf
    for candidate in meeting:
        if not least <= candidate.predicted.weight_bytes <= most:
            continue  # hardly another one than that which fell short
        model, _, _ = options.load_model(args)
        gearbox = geared(args, model, Ladder(candidate.gears))
        file = file_of(args, gearbox, candidate, wish, recordings[candidate.gears[0]])
        steps = progress.track(
            steps_of(gearbox, candidate, file, windows), len(reference.nll), description=f"verify {candidate}"
        )
        recording = record(steps, reference)
        read = Costs(gearbox, gearbox.ladder).weight_bytes(recording)
        outcome = Outcome(float(recording.agree.mean()), float(recording.kl.mean()), read)
        if wish.met_by(outcome):
            return candidate, outcome, asdict(file)
        terminal.note(f"{candidate}: predicted to meet {wish}, and in a sequential run does not ({shown(outcome)})")
        if wish.weight_bytes is None:
            least = candidate.predicted.weight_bytes * MODEST
        else:
            most = candidate.predicted.weight_bytes / MODEST
    raise GearbxError(f"nothing that was predicted to meet {wish} does so in a sequential run; allow more")


def steps_of(
    gearbox: Gearbox, candidate: Candidate, file: DraftFile | ThresholdFile, windows: list[list[int]]
) -> Iterator[Step]:
    """A candidate in a gearbox of its own, one token at a time on a KV cache that keeps what low gears wrote."""
    low, high = gearbox.ladder[0], gearbox.ladder.top
    if isinstance(file, DraftFile):
        return drafted(gearbox, windows, low, high, file.rule())
    if candidate.mode == KICKDOWN:
        threshold = candidate.thresholds[0]
        policy = SameToken(low, high, lambda place, q: float(entropy_of_logprobs(log_softmax(q))), threshold)
        return driven(gearbox, windows, policy)
    return driven(gearbox, windows, Static(low))


def file_of(
    args: argparse.Namespace, gearbox: Gearbox, candidate: Candidate, wish: Wish, recorded: Recording
) -> DraftFile | ThresholdFile:
    """What generate --thresholds reads.

    Args:
        recorded: the candidate's low gear alone.
    """
    name = model_name(args.model)
    if candidate.mode == LOSSLESS:
        low, top = gearbox.ladder
        agreements = {low: [Agreement(*sequence) for sequence in sequences_of(recorded)]}
        (made,) = draft_files(gearbox, top, agreements, name, args.q_group_size, args.format)
        return made
    return ThresholdFile(
        thresholds=list(candidate.thresholds),
        vocab_size=vocabulary(gearbox.model),
        model=name,
        method=str(wish),
        gears=list(candidate.gears),
        tokens=len(recorded.nll),
        window=DEFAULT_WINDOW,
        hysteresis=DEFAULT_HYSTERESIS,
        min_gear_duration=DEFAULT_MIN_GEAR_DURATION,
        mode=candidate.mode,
        fingerprint=gearbox.fingerprint,
    )


def best_static(found: list[Candidate], wish: Wish) -> Candidate | None:
    """The best static gear that meets the wish, if any does."""
    static = [c for c in found if c.mode == STATIC and wish.met_by(c.predicted)]
    return min(static, key=lambda c: wish.rank(c.predicted), default=None)


def tell(chosen: Candidate, outcome: Outcome, static: Candidate | None, wish: Wish) -> None:
    """Say what was chosen, and what a static gear would come to."""
    terminal.note(f"{chosen} meets {wish} with {shown(outcome)} (predicted: {shown(chosen.predicted)})")
    if chosen.mode == STATIC:
        terminal.note("a static gear is better here than any way of shifting: use it alone")
    elif static is None:
        terminal.note("no static gear of this ladder meets it")
    else:
        terminal.note(f"the best static gear that meets it is {static}, with {shown(static.predicted)}")


def shown(outcome: Outcome) -> str:
    return (
        f"agreement {outcome.agreement:.4f}, mean KL {outcome.kl_mean:.3g}, "
        f"{terminal.human_bytes(outcome.weight_bytes)} of weights per token"
    )
