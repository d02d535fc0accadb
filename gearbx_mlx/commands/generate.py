"""Write a text with one model in gears."""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..cli import terminal
from ..cli.gate import check_routing
from ..cli.gearbox import in_whole_weights, make_gearbox, settle_gears, show_kernels
from ..cli.gears import GearSettings
from ..cli.generation import generation_keywords, length_of, load_cache
from ..cli.governing import check_governing, governor
from ..cli.loaded import load_model, room_for
from ..cli.mode_choice import ModeChoice, choose_mode, make_mode, takes_whole_weights
from ..cli.parsers.generate import GenerateSettings
from ..cli.prompt import encode_prompt, read_prompt
from ..cli.results import Draft, summary_of
from ..cli.room import warn_of_memory
from ..cli.tables import layers_table, summary_table
from ..decoding.mode import Mode
from ..decoding.stream import stream_generate
from ..gears.gearbox import Gearbox
from ..gears.observer import Observer
from ..loading import gears_of, model_name
from .written_text import show_summary, write_out


def run(settings: GenerateSettings) -> int:
    trace, summary = settings.output.paths()
    prompt = read_prompt(settings.input.prompt)
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    if settings.mode.small_model is not None:
        from . import generate_pair  # which one model need not wait for

        return generate_pair.run(settings, settings.mode.small_model, prompt, trace, summary)
    choice, gears = settle(settings)
    takes_whole = takes_whole_weights(settings, choice, gears_of(settings.model.model))
    cache, model_path = load_cache(settings.input.prompt_cache_file, settings.model.model)
    if not settings.mode.observes:
        warn_of_memory(model_path, gears, takes_whole)
    model, tokenizer, config = load_model(replace(settings.model, model=model_path))
    tokens = encode_prompt(settings.prompt, tokenizer, prompt, settings.input.prefill_response, cache is not None)
    read = length_of(settings.input.prompt_cache_file, cache, model) + len(tokens)
    max_tokens = room_for(config, read, settings.prompt.max_tokens, settings.cache.max_kv_size)
    keywords = generation_keywords(settings.sampling, settings.cache, tokenizer, cache)
    if takes_whole:
        gears = in_whole_weights(gears, model)
    gearbox = make_gearbox(gears, model, model_path, settings.model.dtype, settings.mode.observes)
    mode = make_mode(choice, gears.gears, gearbox, prompt)
    announce(settings, gearbox, model_path, mode)
    with governor(settings.controller, gearbox, settings.output.verbose, **gears.governor_keywords()) as controller:
        keywords |= {"mode": mode, "gearbox": gearbox, "controller": controller}
        responses = stream_generate(model, tokenizer, tokens, max_tokens, **keywords)
        names = [gear.name for gear in gears.gears]
        written = write_out(responses, names, trace_fields(mode, keywords), settings.output, trace)
    draft_path, draft_model = settings.cache.draft_model, keywords["draft_model"]
    draft = Draft(draft_path, draft_model) if draft_path is not None else None
    counted = written.tally, written.speed, mx.get_peak_memory()
    result = summary_of(model_name(model_path), gearbox, mode, *counted, controller, draft)
    show_summary(result, summary_table(result, mode.rows(result)), settings.output.verbose, summary)
    if settings.output.describe and isinstance(gearbox, Gearbox) and gearbox.kernels.native:
        show_kernels(gearbox)  # of the gears and numbers of vectors that the text had
    return written.status


def settle(settings: GenerateSettings) -> tuple[ModeChoice, GearSettings]:
    """Mode and gears that flags, files and checkpoint ask for together: everything that can be wrong without weights.

    Raises:
        GearbxError: settings that do not fit together.
    """
    model = settings.model.model
    saved = gears_of(model)
    choice = choose_mode(settings, saved)
    check_governing(settings.controller, choice.mode, settings.cache.draft_model)
    layout = replace(settings.layout, gears=choice.gears, format=choice.format)
    gears = settle_gears(model, layout, settings.gears, settings.floors)
    cap_bits = settings.controller.widths(model, gears.gears, gears.format, saved is not None)
    check_routing(choice.routing, gears.gears)
    if choice.gear is not None:
        gears.gears.find(choice.gear)
    return choice, replace(gears, cap_bits=cap_bits)


def announce(settings: GenerateSettings, gearbox: Gearbox | Observer, model_path: str | None, mode: Mode) -> None:
    """Print, before the text, that nothing shifts; and, with --describe, what every layer runs on, and how."""
    if isinstance(gearbox, Observer) and not settings.mode.observes and settings.output.verbose:
        terminal.note(f"{model_name(model_path)} is quantized already: telemetry only, no layer changes gear")
    if settings.output.describe:
        terminal.messages.print(layers_table(gearbox.ladder, gearbox.layer_paths()))
        if mode.about():
            terminal.note(mode.about())


def trace_fields(mode: Any, keywords: dict[str, Any]) -> tuple[str, ...]:
    """Fields of a response that the trace shows in this mode; with a draft model what was drafted as well."""
    if keywords["draft_model"] is None:
        return mode.trace_fields
    return (*mode.trace_fields, "passes", "weight_bytes", "drafted", "from_draft")
