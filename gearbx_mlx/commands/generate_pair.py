"""Write a text with two models that take turns."""

from pathlib import Path

import mlx.core as mx

from ..cli.generation import generation_keywords
from ..cli.loaded import room_for
from ..cli.loaded_pair import load_pair, summary_of_pair
from ..cli.pair import turns_of
from ..cli.parsers.generate import GenerateSettings
from ..cli.prompt import encode_prompt
from ..cli.tables import pair_table
from ..decoding.pair import Pair
from ..decoding.stream import stream_generate
from ..routing.pair import NAMES
from .written_text import show_summary, write_out


def run(settings: GenerateSettings, small_model: str, prompt: str, trace: Path | None, summary: Path | None) -> int:
    turns = turns_of(settings.routing.thresholds, settings.gate)
    pair = load_pair(settings.model, small_model)
    tokens = encode_prompt(settings.prompt, pair.tokenizer, prompt, settings.input.prefill_response)
    max_tokens = room_for(pair.config, len(tokens), settings.prompt.max_tokens, settings.cache.max_kv_size)
    threshold = turns.threshold(pair.vocab_size)
    mode = Pair(pair.small, threshold, turns.window, turns.min_duration, initial_gear=settings.routing.initial_gear)
    keywords = generation_keywords(settings.sampling, settings.cache, pair.tokenizer)
    responses = stream_generate(pair.large, pair.tokenizer, tokens, max_tokens, mode=mode, **keywords)
    written = write_out(responses, NAMES, mode.trace_fields, settings.output, trace)
    names = small_model, settings.model.model
    result = summary_of_pair(names, pair, mode, written.tally, written.speed, mx.get_peak_memory())
    result |= written.energy_fields()
    show_summary(result, pair_table(result, mode.rows(result)), settings.output.verbose, summary)
    return written.status
