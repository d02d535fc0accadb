"""python -m gearbx_mlx.generate: write a text, and watch the gears while it is written."""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import terminal
from .files.writing import write_text
from .telemetry.summary import Tally, as_json
from .telemetry.trace import TraceWriter, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .decoding.response import GearResponse
    from .results import Speed

DEFAULT_PROMPT = (
    "A baker makes 36 rolls in the morning and half as many in the afternoon. "
    "She sells each roll for $2. How much money does she earn that day?"
)


def setup_arg_parser() -> argparse.ArgumentParser:
    from . import options, options_gears, options_machine, options_modes, pairing

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.generate",
        description="Generate text with a model that changes the precision of its weights while it writes.",
        epilog="In mode route, a shift acts two tokens after the one that caused it: mlx-lm computes one token ahead.",
    )
    options.add_model_flags(parser)
    options.add_prompt_flags(parser)
    parser.set_defaults(max_tokens=options.DEFAULT_MAX_TOKENS)
    prompt = parser.add_argument_group("input")
    prompt.add_argument("--prompt", "-p", default=DEFAULT_PROMPT, help="Message to be processed ('-' reads from stdin)")
    prompt.add_argument("--prefill-response", help="Prefill response to be used for the chat template")
    prompt.add_argument("--prompt-cache-file", help="A file containing saved KV caches to avoid recomputing them")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--seed", type=int, help="PRNG seed")
    sampling.add_argument("--temp", type=float, default=0.0, help="Sampling temperature")
    sampling.add_argument("--top-p", type=float, default=1.0, help="Sampling top-p")
    sampling.add_argument("--min-p", type=float, default=0.0, help="Sampling min-p")
    sampling.add_argument("--top-k", type=int, default=0, help="Sampling top-k")
    sampling.add_argument("--xtc-probability", type=float, default=0.0, help="Probability of XTC sampling")
    sampling.add_argument("--xtc-threshold", type=float, default=0.1, help="Threshold for XTC sampling")
    sampling.add_argument("--min-tokens-to-keep", type=int, default=1, help="Tokens to keep for min-p sampling.")

    cache = parser.add_argument_group("KV cache and drafts")
    cache.add_argument("--max-kv-size", type=int, help="Set the maximum key-value cache size")
    cache.add_argument("--prefill-step-size", type=int, default=2048, help="Prompt tokens processed at a time.")
    cache.add_argument("--kv-bits", type=int, help="Bits for KV cache quantization. Default: none.")
    cache.add_argument("--kv-group-size", type=int, default=64, help="Group size for KV cache quantization.")
    cache.add_argument("--quantized-kv-start", type=int, default=5000, help="Step to begin KV cache quantization.")
    cache.add_argument("--draft-model", help="A model to be used for speculative decoding.")
    cache.add_argument("--num-draft-tokens", type=int, default=3, help="Tokens to draft. Default: 3")

    options_gears.add_gear_flags(parser)
    options.add_routing_flags(parser)
    options_modes.add_mode_flags(parser)
    pairing.add_pair_flags(parser)
    options_machine.add_machine_flags(parser)

    output = parser.add_argument_group("output")
    output.add_argument("--verbose", type=str2bool, default=True, help="False: the text alone, when it is complete")
    output.add_argument("--trace", metavar="FILE.jsonl", help="Write one JSON object per token.")
    output.add_argument("--summary", metavar="FILE.json", help="Write the summary as JSON.")
    output.add_argument(
        "--describe", action="store_true", help="Before the text: each layer's bits and kernels, and why, on stderr."
    )
    output.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="Tint tokens by gear.")
    return parser


def str2bool(text: str) -> bool:
    return text.lower() not in ("false", "f")


def generation_keywords(args: argparse.Namespace, tokenizer: Any, cache: Any) -> dict[str, Any]:
    """What mlx-lm's stream_generate is to be given."""
    from mlx_lm.sample_utils import make_sampler

    from .errors import GearbxError
    from .loading import load

    draft_model = None
    if args.draft_model is not None:
        draft_model, draft_tokenizer = load(args.draft_model)
        if draft_tokenizer.vocab_size != tokenizer.vocab_size:
            raise GearbxError(f"--draft-model {args.draft_model}: its vocabulary is not that of the model")
    if args.top_k >= tokenizer.vocab_size:
        raise GearbxError(f"--top-k is {args.top_k}, and the vocabulary {tokenizer.vocab_size}; give fewer")
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
    return {
        "sampler": sampler,
        "max_kv_size": args.max_kv_size,
        "prefill_step_size": args.prefill_step_size,
        "prompt_cache": cache,
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
        "draft_model": draft_model,
        "num_draft_tokens": args.num_draft_tokens,
    }


def load_cache(args: argparse.Namespace) -> Any:
    """The prompt cache that is named, or None. Without --model, the model is the one it was made with.

    Raises:
        GearbxError: not a prompt cache, or one of another model.
    """
    from mlx_lm.models.cache import load_prompt_cache

    from .errors import GearbxError
    from .loading import one_line

    file = args.prompt_cache_file
    if file is None:
        return None
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        made_with = metadata["model"]
    except Exception as error:  # whatever a file that is something else makes of it
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); make one with mlx_lm.cache_prompt"
        ) from error
    if args.model is None:
        args.model = made_with
    if args.model != made_with:
        raise GearbxError(f"{file}: made with the model {made_with}, not {args.model}; name that one")
    return cache


def check(args: argparse.Namespace) -> tuple[str, Path | None, Path | None]:
    """Find everything that can be wrong without a model before one is loaded.

    Returns:
        the prompt, and where trace and summary go.
    """
    from . import options
    from .errors import GearbxError

    options.check_numbers(args)
    trace, summary = (options.output_path(file) if file else None for file in (args.trace, args.summary))
    if trace and summary and trace.resolve() == summary.resolve() and not trace.is_char_device():
        raise GearbxError(f"{trace}: both --trace and --summary; give two files")
    prompt = options.read_prompt(args.prompt)
    options.check_prompt(prompt)
    return prompt, trace, summary


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from . import options, options_gears, options_machine, options_modes, pairing
    from .decoding.stream import TELEMETRY_ONLY, choose_mode, stream_generate
    from .gears.ladder import Ladder
    from .loading import model_name
    from .results import summary_of

    if pairing.is_pair(args):
        return run_pair(args)
    prompt, trace, summary = check(args)
    options_modes.apply_mode(args)
    options_gears.settle_gears(args)
    options_machine.settle_machine(args)
    ladder = Ladder.parse(args.gears)
    options.check_routing(args, ladder)
    if args.seed is not None:
        mx.random.seed(args.seed)
    cache = load_cache(args)
    model, tokenizer, config = options.load_model(args)
    tokens = options.encode_prompt(args, tokenizer, prompt, args.prefill_response, after_cache=cache is not None)
    cached = cache[0].offset if cache else 0
    max_tokens = options.room_for(config, cached + len(tokens), args.max_tokens, args.max_kv_size)
    routing = options.make_routing(args, ladder, model)
    keywords = generation_keywords(args, tokenizer, cache)
    gearbox = options_gears.make_gearbox(args, model, ladder)
    mode = choose_mode(model, gearbox, args.mode)
    if mode == TELEMETRY_ONLY and not args.telemetry_only and args.verbose:
        terminal.note(f"{model_name(args.model)} is quantized already: telemetry only, no layer changes gear")
    if args.describe:
        terminal.messages.print(terminal.layers_table(ladder, gearbox.layer_paths()))
    with options_machine.governor(args, gearbox, **options_gears.for_governor(args)) as controller:
        responses = stream_generate(
            model,
            tokenizer,
            tokens,
            max_tokens,
            gearbox=gearbox,
            mode=mode,
            controller=controller,
            initial_gear=options.initial_gear(args, ladder, prompt),
            **vars(routing),
            **options_modes.mode_keywords(args),
            **keywords,
        )
        status, tally, speed = write_out(args, responses, mode, [gear.name for gear in ladder], trace)
    result = summary_of(model_name(args.model), gearbox, mode, tally, speed, mx.get_peak_memory(), controller)
    tell(args, result, terminal.summary_table, summary)
    return status


def run_pair(args: argparse.Namespace) -> int:
    """Two models that take turns."""
    import mlx.core as mx

    from . import options, pairing
    from .decoding.stream import PAIR, stream_generate
    from .routing.pair import NAMES

    turns = pairing.turns_of(args)
    prompt, trace, summary = check(args)
    if args.seed is not None:
        mx.random.seed(args.seed)
    pair = pairing.load_pair(args)
    tokens = options.encode_prompt(args, pair.tokenizer, prompt, args.prefill_response)
    max_tokens = options.room_for(pair.config, len(tokens), args.max_tokens, args.max_kv_size)
    responses = stream_generate(
        pair.large,
        pair.tokenizer,
        tokens,
        max_tokens,
        small_model=pair.small,
        thresholds=(turns.threshold(pair.vocab_size),),
        window=turns.window,
        min_gear_duration=turns.min_duration,
        initial_gear=args.initial_gear,
        **generation_keywords(args, pair.tokenizer, None),
    )
    status, tally, speed = write_out(args, responses, PAIR, NAMES, trace)
    tell(
        args,
        pairing.summary_of_pair(args, pair, turns, tally, speed, mx.get_peak_memory()),
        pairing.pair_table,
        summary,
    )
    return status


def write_out(
    args: argparse.Namespace, responses: "Iterable[GearResponse]", mode: str, names: "Sequence[str]", trace: Path | None
) -> "tuple[int, Tally, Speed]":
    """The text and the trace, as they come.

    Args:
        names: of the gears, lowest first.

    Returns:
        exit status, what adds up over the tokens, and mlx-lm's figures.
    """
    import mlx.core as mx

    from .results import Speed

    tally, speed, text, last = Tally.of(names), Speed(), "", None
    out = terminal.TintedText(names, args.color if args.verbose else "never")
    status = 0
    mx.reset_peak_memory()
    try:
        with TraceWriter(trace) as writer:
            for response in responses:
                writer.write(record(tally.tokens, response, mode=mode))
                tally.add(response)
                last = response
                text += response.text
                if args.verbose:
                    out.write(response.text, response.gear)
    except KeyboardInterrupt:
        status = terminal.INTERRUPTED
    speed.add(last)
    print(text if not args.verbose else "", flush=True)
    return status, tally, speed


def tell(args: argparse.Namespace, result: dict[str, Any], table: "Callable[[dict[str, Any]], Any]", file: Path | None):
    """The summary: a table under the text, and JSON where it is asked for."""
    if args.verbose:
        terminal.messages.print()
        terminal.messages.print(table(result))
    if file:
        write_text(file, as_json(result))


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))


class _Callable(ModuleType):
    """`gearbx_mlx.generate` is a function; once this module is imported it is the module, and still that function."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        from .decoding.stream import generate

        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    main()
