"""calibrate --mode lossless: the gear that drafts, and when it should stop."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm import stream_generate
from rich.table import Table

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.prompt import encoded
from ..cli.resolved import resolve_gears
from ..cli.tables import columns
from ..decoding.draft_trials import GearRecord, draft_files, record_agreement
from ..errors import GearbxError
from ..evaluation.session import Journal
from ..formats.base import Format
from ..gears.discovery import is_quantized
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE, Gear, Ladder
from ..routing.acceptance import Dial, DraftFile
from ..routing.rounds import TIME
from . import CalibrateSettings
from .shared import Calibration, Prompts, check_ladder, inputs_of, prompts_of

# The ladders that are compared without --gears, by the bits of the top gear: planes for the draft alone, and planes for
# other modes as well.
LADDERS = {
    16: ("3,16", "4,16", "5,16", "6,16", "4,8,16", "3,4,8,16"),
    8: ("3,8", "4,8", "5,8", "6,8", "3,4,8"),
}
DRAFT_BITS = range(3, 7)


def calibrate_drafting(settings: CalibrateSettings, place: Path | None) -> Calibration:
    """The drafting that reads the fewest bytes of weights per token, on the text of the top gear.

    Args:
        place: of the journal, if there is one.
    """
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors)
    ladders = [resolved.ladder]
    if settings.layout.gears is None and resolved.saved is None:
        ladders = ladders_to_compare(resolved.format, settings.calibration.top)
    check_ladder(ladders[0], "nothing to draft with")
    texts = prompts_of(settings.calibration)
    loaded = Loaded.of(replace(resolved, ladder=ladders[0]))
    if is_quantized(loaded.model):
        ladders = [loaded.resolved.ladder]
    prompts = encoded(texts, settings.prompt, loaded.tokenizer, loaded.config)
    compared = {"gears": [str(ladder) for ladder in ladders]}
    journal = Journal(place, inputs_of(settings, resolved, prompts) | compared, list[GearRecord])
    files: list[DraftFile] = []
    context = settings.target.context if settings.calibration.cost == TIME else None
    with terminal.counting("ladders and prompts", len(ladders) * len(prompts)) as advance:
        for ladder in ladders:
            if files and resolved.format.ladders:  # the gears before dropped the weights
                loaded = Loaded.of(replace(resolved, ladder=ladder))
            files += files_of(ladder, loaded, prompts, journal, advance, context, settings.dial())
    best = min(files, key=lambda file: file.weight_bytes_per_token if file.times is None else file.times.per_token)
    line = (
        f"gears {','.join(map(str, best.gears))}, drafting in {best.draft} bits to a bound of {best.bound:g}, "
        f"{times_fewer(best.weight_bytes_per_token, best):.2f} times fewer bytes of weights than the top gear"
        f"{further_gains(best)} (predicted)"
    )
    return Calibration(best, line, table=drafting_table(files, best))


def ladders_to_compare(format: Format, top: int) -> list[Ladder]:
    """A format's own ladders, or else `LADDERS`. Raises GearbxError if none has this top gear."""
    known = format.ladders
    found = [Ladder(bits) for bits in known if bits[-1] == top] if known else [*map(Ladder.parse, LADDERS[top])]
    if not found:
        raise GearbxError(f"--top {top}: the top gear of format {format.name} has 16 bits; leave out --top or --format")
    return found


def files_of(
    ladder: Ladder,
    loaded: Loaded,
    prompts: Prompts,
    journal: Journal,
    advance: Callable[[], object],
    context: int | None = None,
    dial: Dial | None = None,
) -> list[DraftFile]:
    """A file for each gear of a ladder that may draft.

    Args:
        journal: gets what is recorded of each prompt.
        advance: called after every prompt.
        context: measure what passes take after so many tokens, too.
        dial: which drafted tokens are to stay.
    """
    resolved = loaded.resolved
    bits = [gear.bits for gear in ladder]
    # The originals stay in the model, even where the top gear has fewer bits: the next ladder is made from them.
    whole = bits[-1] == DENSE or resolved.saved or is_quantized(loaded.model)
    stored = bits if whole else [*bits, DENSE]
    gearbox = replace(loaded, resolved=replace(resolved, ladder=Ladder(stored))).gearbox()
    top = gearbox.ladder.find(bits[-1])
    below = [gear for gear in gearbox.ladder if gear.bits < top.bits]
    drafting = [gear for gear in below if gear.bits in DRAFT_BITS] or below
    recorded: dict[Any, list] = {gear: [] for gear in drafting}
    for number, prompt in enumerate(prompts):
        record = partial(agreements, gearbox, loaded.tokenizer, top, drafting, *prompt)
        for gear, agreement in zip(drafting, journal.made(f"gears {ladder}, prompt {number}", record)):
            recorded[gear].append(agreement)
        advance()
    about = loaded.name, resolved.group_size, resolved.format.name
    files = list(draft_files(gearbox, top, recorded, *about, context, dial))
    gearbox.shift(gearbox.ladder.top)
    return files


def agreements(
    gearbox: Gearbox, tokenizer: Any, top: Gear, drafting: Sequence[Gear], tokens: list[int], length: int
) -> list[GearRecord]:
    """For each gear that may draft, its agreement with what the top gear writes after a prompt."""
    gearbox.shift(top)
    text = [response.token for response in stream_generate(gearbox.model, tokenizer, tokens, length)]
    return record_agreement(gearbox, top, drafting, tokens, text)


def times_fewer(weight_bytes: float, file: DraftFile) -> float:
    """How many times as many bytes per token the top gear alone reads."""
    return file.weight_bytes_per_token_top / weight_bytes


def further_gains(file: DraftFile) -> str:
    """What is saved over the original weights, where the top gear reads other bytes; in time, where that was measured;
    and the tolerance, where there is one.
    """
    original = file.weight_bytes_per_token_original
    said = "" if original is None else f" and {original / file.weight_bytes_per_token:.2f} than the original weights"
    said += "" if file.times is None else f", {file.times.times_faster:.2f} times as fast as the top gear"
    return said + (f", tolerance {file.tolerance:.3g} nats" if file.tolerance else "")


def drafting_table(files: Sequence[DraftFile], best: DraftFile) -> Table:
    """What was compared, one line for each ladder and draft gear."""
    head = "gears", "draft", "agrees", "best length", "times fewer bytes", "bound", "times fewer bytes"
    rows = [
        [
            ",".join(map(str, file.gears)) + (" *" if file is best else ""),
            f"{file.draft} bits",
            f"{file.agreement_overall:.1%}",
            str(file.best_fixed_length),
            f"{times_fewer(file.fixed_weight_bytes_per_token, file):.2f}",
            f"{file.bound:g}",
            f"{times_fewer(file.weight_bytes_per_token, file):.2f}",
            *([] if file.times is None else [f"{file.times.times_faster:.2f}"]),
        ]
        for file in files
    ]
    return columns([*head, "times as fast"] if best.times is not None else head, rows)
