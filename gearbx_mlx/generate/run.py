"""Generation with one model in gears, or with a pair of models."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..cli import terminal
from ..cli.build import (
    Geared,
    Loaded,
    decided,
    generation_keywords,
    load_pair,
    show_kernels,
)
from ..cli.flags import QUIET, OutputSettings
from ..cli.prompt import encode_prompt, piped_prompt, read_prompt, room_for
from ..cli.prompt_cache import PromptCache, load_cache
from ..cli.signals import in_whole
from ..cli.start import entered
from ..cli.tables import colors_line, layers_table, pair_table, summary_table
from ..compat.templates import prepare
from ..compat.versions import program_versions
from ..decoding.caches import length
from ..decoding.learned import speedup_of_calibration
from ..decoding.lossless import Lossless
from ..decoding.mode import Mode
from ..decoding.policy import DEFAULT_LENGTH, MAX_DRAFTED
from ..decoding.response import GearResponse
from ..decoding.route import auto_thresholds
from ..decoding.stream import stream_generate
from ..errors import GearbxError, OutputLost
from ..files.writing import write_text
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..gears.ladder import DEFAULT_KERNELS
from ..gears.tensor_files import ArrayPlace, hash_bytes, hash_place
from ..kernels.dispatch import on_cpu
from ..loading import model_name
from ..ranks.agreement import check_equal
from ..ranks.place import current
from ..routing.gates import AUTO, ReadThresholds
from ..routing.pair import NAMES
from ..settings import flag_of
from ..telemetry.summary import as_json
from ..telemetry.trace import TraceWriter, record, writer_of
from . import DEFAULT_PROMPT, GenerateSettings


def run_pair(
    settings: GenerateSettings, small_model: str, prompt: str, trace: Path | None, summary: Path | None
) -> int:
    pair = load_pair(settings.model, small_model)
    tokens = encode_prompt(settings.prompt, pair.tokenizer, prompt, settings.input.prefill_response)
    max_tokens = room_for(pair.config, len(tokens), settings.prompt.max_tokens, settings.cache.max_kv_size)
    mode = pair.mode(settings.mode.given())
    keywords = generation_keywords(settings.sampling, settings.cache, pair.tokenizer)
    bar = terminal.PromptBar()
    if settings.output.is_verbose:
        keywords["prompt_progress_callback"] = bar.update
    responses = stream_generate(pair.large, pair.tokenizer, tokens, max_tokens, mode=mode, **keywords)
    if prompt == DEFAULT_PROMPT and settings.output.is_verbose:
        introduce(mode)
    with bar:
        status = write_out(responses, NAMES, mode.trace_fields, settings.output, trace)
    result = responses.summary(model_name(settings.model.model), small_model) | responses.since(entered())
    show_summary(result, pair_table(result, mode.rows(result)), settings.output.is_verbose, summary)
    return status


def write_out(
    responses: Iterable[GearResponse],
    gears: Sequence[str],
    fields: Sequence[str],
    output: OutputSettings,
    trace: Path | None,
) -> int:
    """Write text and trace as they are generated, complete after Ctrl-C too. Return the exit status.

    Args:
        gears: names, lowest first.
        fields: fields of a response that the mode adds to the trace.
    """
    text = ""
    out = terminal.TintedText(gears, output.is_verbose)
    status = 0
    mx.reset_peak_memory()
    try:
        with TraceWriter(trace) as writer, out.whole():
            for number, response in enumerate(in_whole(responses)):
                writer.write(record(number, response, fields=fields))
                text += response.text
                if output.is_verbose:
                    out.write(response.text, writer_of(response))
    except KeyboardInterrupt:
        status = terminal.INTERRUPTED
    if not (output.is_verbose and text):
        with suppress(OutputLost) if status else nullcontext():  # a closed terminal has no stdout
            print(text, flush=True)
    return status


def show_summary(result: dict[str, Any], table: Table, verbose: bool, file: Path | None) -> None:
    """Print the summary's table, and write the summary as JSON to a file, if any."""
    if verbose:
        terminal.messages.print()
        terminal.messages.print(table)
    if file:
        write_text(file, as_json(result))


UNCOMPARED = ("model", "trace", "summary", "verbose")  # compared by fingerprint, or used by rank 0 only
TEXT_FLAGS = ("prompt", "prefill_response")  # text even if a file has that name
ONE_PROCESS = {  # flags that ranks cannot have: the reason, with a remedy
    "small_model": "ranks run a single model",
    "draft_model": "in mode lossless a low gear drafts without one",
    "adapter_path": "use mlx_lm.fuse first",
    "prompt_cache_file": "pass the prompt instead",
    "base": "use gearbx_mlx convert --calibrate first",
    "target_tps": "one machine's speed would set the gears of all",
}


def on_this_rank(settings: GenerateSettings) -> GenerateSettings:
    """Return the settings of this rank, unchanged without ranks. Only rank 0 writes output.

    Raises:
        GearbxError: flags, their files or versions that differ between ranks, or flags that ranks cannot have.
    """
    run = current()
    if run is None:
        return settings
    given = values(settings)
    computing = {f"version of {name}": version for name, version in program_versions().items()}
    check_equal(run.group, computing | {"kind of machine": platform.machine()} | flag_facts(given))
    for name, why in ONE_PROCESS.items():
        if given.get(name) not in (None, False):
            raise GearbxError(f"{flag_of(name)}: needs one process, got {run.place.size} ranks; omit it ({why})")
    if settings.input.prompt == "-":
        raise GearbxError("--prompt -: mlx.launch never closes standard input; pass the prompt itself")
    return settings if run.place.rank == 0 else replace(settings, output=OutputSettings(verbose=QUIET))


def flag_facts(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the value of each flag by its name; for a file its digest, because paths differ between machines."""
    return {
        flag_of(name): str(given[name]) if name in TEXT_FLAGS else fact(given[name])
        for name in given
        if name not in UNCOMPARED
    }


def fact(value: Any) -> str:
    if isinstance(value, ReadThresholds):
        return value.content.text()
    if not isinstance(value, str | Path) or not os.path.isfile(value):
        return str(value)
    try:
        whole = ArrayPlace(Path(value), 0, os.path.getsize(value))
        return f"a file with the digest {hash_place(whole)[:32]}"
    except OSError:
        return str(value)  # the error comes from the code that reads the file


def check_together(gearbox: Gearbox | Observer, mode: Mode, tokens: Sequence[int]) -> None:
    """Validate that model, bits of layers, mode and prompt are equal on all ranks, as their messages require."""
    run = current()
    if run is None:
        return
    text = mode_facts(mode) | {"the prompt": hash_bytes(repr(list(tokens)).encode())[:32]}
    check_equal(run.group, model_facts(gearbox) | text)


def mode_facts(mode: Mode) -> dict[str, str]:
    """Return the mode and its settings, for comparison."""
    settings = {f"{item.name} of mode {mode.name}": str(getattr(mode, item.name)) for item in fields(mode)}
    return {"the mode": mode.name} | settings


def model_facts(gearbox: Gearbox | Observer) -> dict[str, str]:
    """Return the model and the bits of its layers in every gear, for comparison."""
    layers = [(each.path, each.bits) for each in gearbox.layer_paths()]
    facts = {
        "the model's fingerprint": model_fingerprint(gearbox.model),
        "the ladder": str(gearbox.ladder),
        "the bits of the layers": hash_bytes(repr(layers).encode())[:32],
    }
    if isinstance(gearbox, Gearbox):
        facts |= {"the format": gearbox.format.name, "the group size": str(gearbox.group_size)}
        facts["the type of the activations"] = str(gearbox.compute_dtype)
    return facts


def values(settings: Any) -> Mapping[str, Any]:
    """Return every flag's value, by its field's name."""
    groups = [getattr(settings, item.name) for item in fields(settings)]
    return {item.name: getattr(group, item.name) for group in groups for item in fields(group)}


def run(settings: GenerateSettings) -> int:
    settings = on_this_rank(settings)
    trace, summary = settings.output.paths()
    prompt = read_prompt(settings.input.prompt)
    if prompt == DEFAULT_PROMPT and current() is None:
        prompt = piped_prompt() or prompt
    if not settings.prompt.ignore_chat_template:
        prepare()
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    if settings.mode.small_model is not None:
        return run_pair(settings, settings.mode.small_model, prompt, trace, summary)
    cache = load_cache(settings.input.prompt_cache_file, settings.model.model)
    if cache is not None:  # the cache names the model
        settings = replace(settings, model=replace(settings.model, model=cache.model))
    loaded = Loaded.of(decided(settings))
    model, tokenizer = loaded.model, loaded.tokenizer
    tokens, entries = to_read(settings, loaded, prompt, cache)
    max_tokens = room_for(
        loaded.config, length(entries or ()) + len(tokens), settings.prompt.max_tokens, settings.cache.max_kv_size
    )
    keywords = generation_keywords(settings.sampling, settings.cache, tokenizer, entries, model)
    geared = loaded.in_gears()
    gearbox, mode = geared.gearbox, mode_of_prompt(settings, geared, prompt, tokens)
    first = prompt == DEFAULT_PROMPT
    if first and settings.model.model is None:
        mode = drafting_always(mode)
    check_together(gearbox, mode, tokens)
    if cache is not None:
        cache.check_weights(model)
        cache.check_gear(mode, gearbox)
    if settings.output.describes:
        terminal.messages.print(layers_table(gearbox.ladder, gearbox.layer_paths()))
        terminal.note(geared.why())
        if mode.about():
            terminal.note(mode.about())
    with geared.governor(settings.output.is_verbose) as controller, terminal.PromptBar() as bar:
        keywords |= {"mode": mode, "gearbox": gearbox, "controller": controller}
        if settings.output.is_verbose:
            keywords["prompt_progress_callback"] = bar.update
        responses = stream_generate(model, tokenizer, tokens, max_tokens, **keywords)
        if first and settings.output.is_verbose:
            introduce(mode, gearbox.ladder_report(), settings.cache.draft_model is not None)
        names = [gear.name for gear in gearbox.ladder]
        status = write_out(responses, names, trace_fields(mode, keywords), settings.output, trace)
    result = responses.summary(loaded.name, settings.cache.draft_model) | responses.since(entered())
    if loaded.decision.chosen.by:
        result["mode_chosen_by"] = flag_of(loaded.decision.chosen.by)
    table = summary_table(result, mode.rows(result), settings.output.describes)
    show_summary(result, table, settings.output.is_verbose, summary)
    if settings.output.is_verbose:
        note_calibration_speedup(geared, result)
        if isinstance(gearbox, Observer) and on_cpu() and settings.gears.kernels.name == DEFAULT_KERNELS:
            terminal.note(f"mode {mode.name}: MLX's kernels, slow on this CPU; use --kernels native for speed")
    if settings.output.describes and isinstance(gearbox, Gearbox) and gearbox.kernels.native:
        show_kernels(gearbox)  # for the gears and numbers of vectors of this output
    return status


def note_calibration_speedup(geared: Geared, summary: Mapping[str, Any]) -> None:
    """Print the speedup of a calibrated base, if there is none and many drafts were rejected."""
    decision, gearbox = geared.loaded.decision, geared.gearbox
    if not decision.takes_base or not isinstance(gearbox, Gearbox) or gearbox.base:
        return
    speedup, rejected = speedup_of_calibration(gearbox), 1 - summary["acceptance_rate"]
    if speedup is not None and speedup >= 1.05 and rejected >= 0.15:
        terminal.note(
            f"{rejected:.0%} of the drafts were rejected; use --base once (minutes, kept) for a calibrated base and a "
            f"speedup of about {speedup:.2f}×, by the times of this run"
        )


def to_read(
    settings: GenerateSettings, loaded: Loaded, prompt: str, cache: PromptCache | None
) -> tuple[list[int], list[Any] | None]:
    """Return the tokens to prefill, and the caches of the layers (None: new ones).

    Raises:
        GearbxError: as `encode_prompt`, or a prompt cache that does not fit the model.
    """
    prefill = settings.input.prefill_response
    if cache is None:
        return encode_prompt(settings.prompt, loaded.tokenizer, prompt, prefill), None
    before = cache.before(settings.prompt.templates(loaded.tokenizer))
    tokens = encode_prompt(settings.prompt, loaded.tokenizer, prompt, prefill, before)
    return cache.unread(loaded.model, tokens, settings.cache.max_kv_size, before)


def mode_of_prompt(settings: GenerateSettings, geared: Geared, prompt: str, tokens: list[int]) -> Mode:
    """Return the mode, with measured thresholds for --thresholds auto; a note shows them."""
    mode = geared.mode(prompt).resolved(geared.gearbox, geared.loaded.tokenizer, tokens)
    if settings.mode.thresholds == AUTO and settings.output.is_verbose:
        terminal.note(auto_thresholds(geared.gearbox, geared.loaded.tokenizer).about())
    return mode


def drafting_always(mode: Mode) -> Mode:
    """Return mode lossless with fixed drafts, even if drafting is slower; other modes unchanged.

    Drafting is slower with the small demo model, but the first command should show drafts as larger models have them.
    """
    if not isinstance(mode, Lossless) or mode.draft_length is not None:
        return mode
    return replace(mode, draft_length=DEFAULT_LENGTH, lookup_tokens=MAX_DRAFTED)


def introduce(mode: Mode, ladder: Sequence[Mapping[str, Any]] = (), has_draft_model: bool = False) -> None:
    """Print the default prompt, and in mode lossless the legend of token colors."""
    terminal.note(DEFAULT_PROMPT)
    if isinstance(mode, Lossless) and len(ladder) > 1 and terminal.color_system():
        terminal.say(colors_line(ladder, has_draft_model))


def trace_fields(mode: Any, keywords: dict[str, Any]) -> tuple[str, ...]:
    """Return additional trace fields of the mode, and of a KV cache in gears."""
    of_cache = ("kv_bytes", "kv_caches") if keywords["kv_gears"] is not None else ()
    return (*mode.trace_fields, *of_cache)
