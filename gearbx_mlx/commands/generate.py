"""Write a text with one model in gears."""

from typing import Any

import mlx.core as mx

from ..cli import terminal
from ..cli.gate import AUTO
from ..cli.gearbox import show_kernels
from ..cli.geared import Geared, Loaded, settle
from ..cli.generation import generation_keywords
from ..cli.governing import governor
from ..cli.loaded import room_for
from ..cli.parsers.generate import GenerateSettings
from ..cli.prompt import encode_prompt, read_prompt
from ..cli.prompt_cache import PromptCache, load_cache
from ..cli.results import Draft, summary_of
from ..cli.sharded import check_together, on_this_rank
from ..cli.tables import layers_table, summary_table
from ..decoding.caches import length
from ..decoding.mode import Mode
from ..decoding.route import auto_thresholds
from ..decoding.stream import stream_generate
from ..gears.gearbox import Gearbox, Observer
from .written_text import show_summary, write_out


def run(settings: GenerateSettings) -> int:
    settings = on_this_rank(settings)
    trace, summary = settings.output.paths()
    prompt = read_prompt(settings.input.prompt)
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    if settings.mode.small_model is not None:
        from . import generate_pair  # which one model need not wait for

        return generate_pair.run(settings, settings.mode.small_model, prompt, trace, summary)
    settled = settle(settings)
    cache = load_cache(settings.input.prompt_cache_file, settings.model.model)
    loaded = settled.load(settings.model.model if cache is None else cache.model)
    model, tokenizer = loaded.model, loaded.tokenizer
    tokens, entries = to_read(settings, loaded, prompt, cache)
    max_tokens = room_for(
        loaded.config, length(entries or ()) + len(tokens), settings.prompt.max_tokens, settings.cache.max_kv_size
    )
    keywords = generation_keywords(settings.sampling, settings.cache, tokenizer, entries)
    geared = loaded.in_gears()
    gearbox, mode = geared.gearbox, mode_for(settings, geared, prompt, tokens)
    check_together(gearbox, mode, tokens)
    if settings.output.describe:
        describe(gearbox, mode)
    further = geared.gears.governor_keywords()
    with governor(settings.controller, gearbox, settings.output.verbose, **further) as controller:
        keywords |= {"mode": mode, "gearbox": gearbox, "controller": controller}
        responses = stream_generate(model, tokenizer, tokens, max_tokens, **keywords)
        names = [gear.name for gear in geared.gears.gears]
        written = write_out(responses, names, trace_fields(mode, keywords), settings.output, trace)
    draft_path, draft_model = settings.cache.draft_model, keywords["draft_model"]
    draft = Draft(draft_path, draft_model) if draft_path is not None else None
    counted = written.tally, written.speed, mx.get_peak_memory()
    result = summary_of(loaded.name, gearbox, mode, *counted, controller, draft) | written.energy_fields()
    show_summary(result, summary_table(result, mode.rows(result)), settings.output.verbose, summary)
    if settings.output.describe and isinstance(gearbox, Gearbox) and gearbox.kernels.native:
        show_kernels(gearbox)  # of the gears and numbers of vectors that the text had
    return written.status


def to_read(
    settings: GenerateSettings, loaded: Loaded, prompt: str, cache: PromptCache | None
) -> tuple[list[int], list[Any] | None]:
    """The tokens that the model is to read, and the caches of its layers (None: new ones).

    Raises:
        GearbxError: as `encode_prompt`; a prompt cache that does not suit the model.
    """
    prefill = settings.input.prefill_response
    if cache is None:
        return encode_prompt(settings.prompt, loaded.tokenizer, prompt, prefill), None
    before = cache.before(settings.prompt.templates(loaded.tokenizer))
    tokens = encode_prompt(settings.prompt, loaded.tokenizer, prompt, prefill, before)
    return cache.unread(loaded.model, tokens, settings.cache.max_kv_size, before)


def mode_for(settings: GenerateSettings, geared: Geared, prompt: str, tokens: list[int]) -> Mode:
    """The mode, with thresholds that are found on the prompt if the settings ask for that; a note says which."""
    mode = geared.mode(prompt).settled(geared.gearbox, geared.loaded.tokenizer, tokens)
    if settings.routing.thresholds == AUTO and settings.output.verbose:
        terminal.note(auto_thresholds(geared.gearbox, geared.loaded.tokenizer).about())
    return mode


def describe(gearbox: Gearbox | Observer, mode: Mode) -> None:
    """Print what every layer runs on, and how."""
    terminal.messages.print(layers_table(gearbox.ladder, gearbox.layer_paths()))
    if mode.about():
        terminal.note(mode.about())


def trace_fields(mode: Any, keywords: dict[str, Any]) -> tuple[str, ...]:
    """Fields of a response that the trace shows in this mode, with a draft model and with a KV cache in gears."""
    if keywords["kv_gears"] is not None:
        return (*mode.trace_fields, "kv_bytes", "kv_caches")
    if keywords["draft_model"] is None:
        return mode.trace_fields
    return (*mode.trace_fields, "passes", "weight_bytes", "drafted", "from_draft")
