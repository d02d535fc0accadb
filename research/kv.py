"""KV cache gears: loss and savings, for docs/kv_gears.md."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, GearbxError, load
from gearbx_mlx.decoding.caches import put_in_gears
from gearbx_mlx.evaluate.run import over_cache
from gearbx_mlx.evaluation.predictions import context_for, read_at_once, read_documents, recording_of, windows_of
from gearbx_mlx.formats.kv_cache import KVGears, NestedKVCache, block_planes
from gearbx_mlx.kernels import dispatch
from gearbx_mlx.loading import DEMO_MODEL

from .evaluation.driving import StaticPolicy, driven
from .evaluation.runs import noisy
from .lossless import widened
from .studies import TALES, Found, in_turn, ratios, spread, study

CONTEXTS = (256, 512, 1024, 4096)  # of `quality`
LADDERS = ((4, 8), (4, 8, 16))
LONG = (1024, 4096, 16384)  # of `cost`
BITS = (4, 8, 16)
TIMES = 4  # copies of each unit of the demo model
WEIGHTS = "4"  # gear of the weights in a timed step, as in a draft


def one_text(data: Path, folder: Path) -> Path:
    """Return the documents of a file one after the other, so that windows of any context fit."""
    made = folder / "text.txt"
    made.write_text("\n".join(read_documents(data)), encoding="utf-8")
    return made


def of_context(name: str, text: Path, context: int, tokens: int) -> Iterator[list[str]]:
    """Yield the rows of one context; none where the model was not made for it, or the text does not fill it."""
    model, tokenizer, config = load(name, return_config=True)
    try:
        context_for(context, config)
        windows = windows_of(tokenizer, read_documents(text), context, tokens, text.name)
    except GearbxError as error:
        print(f"{Path(name).name}, {context} tokens: {error}")
        return
    gearbox = Gearbox(model, "16", kernels="mlx")
    top = gearbox.ladder.top
    reference = [each.logprobs for window in windows for each in read_at_once(gearbox, window, top)]
    with noisy(gearbox, 0):
        noise = recording_of(driven(gearbox, windows, StaticPolicy(top)), reference).kl.mean()
    for ladder in LADDERS:
        found = []
        for bits in (4, 8):
            reader = over_cache(gearbox, ladder, bits)
            read = recording_of((each for window in windows for each in reader.read(window)), reference)
            found += [f"{read.kl.mean():.2g}", f"{read.agree.mean():.1%}"]
        yield [Path(name).name, str(context), ",".join(map(str, ladder)), *found, f"{noise:.2g}"]
        print(f"{Path(name).name}, {context} tokens, {ladder}: {found}", flush=True)


def of_gears(gearbox: Gearbox, context: int, trials: int) -> list[list[str]]:
    """Return the rows of a context: bytes, milliseconds of attention in all layers, and of a step."""
    engaged = [16]
    cache, alone = (
        filled(gearbox.model, context, KVGears(ladder, lambda: engaged[0], native=True), gearbox.compute_dtype)
        for ladder in (BITS, BITS[:2])
    )

    def step(cache: list[NestedKVCache] = cache) -> None:
        mx.eval(gearbox.model(mx.array([[1]]), cache=cache))
        for layer in cache:
            layer.trim(1)

    def attention() -> None:
        mx.eval([attended(layer, gearbox.model.args.num_attention_heads) for layer in cache])

    parts: dict[str, Callable[[], None]] = {"attention": attention, "step": step, "alone": partial(step, alone)}

    def in_gear(bits: int, work: Callable[[], None]) -> None:
        engaged[0] = bits
        work()

    works = {(name, bits): partial(in_gear, bits, work) for bits in BITS for name, work in parts.items()}
    del works["alone", 16]
    seconds = in_turn(works, trials, time.process_time)  # of all threads: others may use the machine
    read = {bits: sum(bytes_read(layer, engaged, bits) for layer in cache) for bits in BITS}
    halves = filled(gearbox.model, context, KVGears(BITS, lambda: engaged[0]), mx.bfloat16)[0]
    in_half = {bits: bytes_read(halves, engaged, bits) for bits in BITS}
    return [
        [
            str(context),
            str(bits),
            f"{read[bits] / 1e6:.1f}",
            f"{read[bits] / read[16]:.3f}",
            f"{in_half[bits] / in_half[16]:.3f}",
            *(cell for name in ("attention", "step") for cell in times_of(seconds[name, bits], seconds[name, 16])),
            *(times_of(seconds["alone", bits], seconds["step", 16]) if ("alone", bits) in seconds else ("", "")),
        ]
        for bits in BITS
    ]


def filled(model, context: int, gears: KVGears, dtype: mx.Dtype) -> list[NestedKVCache]:
    """Caches with random keys and values of so many tokens."""
    cache = make_prompt_cache(model)
    heads, width = model.args.num_key_value_heads, model.args.head_dim
    for layer in cache:
        layer.update_and_fetch(*(mx.random.normal((1, heads, context, width)).astype(dtype) for _ in range(2)))
    put_in_gears(cache, gears)
    mx.eval([layer.state for layer in cache])
    return cache


def attended(layer: NestedKVCache, heads: int) -> mx.array:
    """Attention of one query over what the engaged gear reads of a layer's cache."""
    queries = mx.ones((1, heads, 1, layer.keys.shape[-1]), layer.keys.dtype)
    nested = layer.read(0)
    if nested is None:
        keys, values = layer.keys_and_values()
        found = dispatch.attention(queries, keys, values, 1.0, None)
    else:
        found = dispatch.nested_attention(queries, nested.entries, block_planes(nested), 1.0, None)
    assert found is not None, "there is no kernel"
    return found


def bytes_read(layer: NestedKVCache, engaged: list[int], bits: int) -> int:
    """Return bytes that a pass of one token reads of keys and values in the gear with `bits`."""
    engaged[0] = bits
    before = dict(layer.gears.meter.bytes)
    layer.count(layer.read(0))
    return layer.gears.meter.bytes[bits] - before.get(bits, 0)


def times_of(seconds: list[float], of_16: list[float]) -> list[str]:
    """Median milliseconds, and the median ratio to gear 16 with the least and the most."""
    return [f"{statistics.median(seconds) * 1e3:.1f} ms", "" if seconds is of_16 else spread(ratios(seconds, of_16))]


@study("docs/kv_gears.md", minutes=15)
def kv_quality(models: list[str] = [], data: Path = TALES, tokens: int = 1000) -> Found:  # noqa: B006
    """Measure the loss of KV cache gears as `evaluate --kv-gears` does, in windows of several lengths.

    Args:
        models: Directories besides the demo model, such as of babyllama105 and stories260K.
        data: Text or JSON Lines.
        tokens: Predictions of each model and context.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = one_text(data, Path(folder))
        named = [str(DEMO_MODEL), *models]
        rows = [row for model in named for context in CONTEXTS for row in of_context(model, text, context, tokens)]
    agreement = "top-1 agreement"
    head = ["model", "context", "`--kv-gears`", "KL, 4 bits", agreement, "KL, 8 bits", agreement, "noise floor"]
    return Found({"kv_quality": table(head, rows)})


@study("docs/kv_gears.md", minutes=5)
def kv_cost(trials: int = 9) -> Found:
    """Measure the savings of KV cache gears: bytes read in a decode step, and time of attention and of the step.

    The demo model is widened, with random keys and values. A step is timed with planes beside entries (4,8,16) and with
    only planes (4,8). All gears alternate within a trial; a ratio compares processor times of one trial.
    """
    mx.set_default_device(mx.cpu)
    gearbox = Gearbox(widened(load()[0], TIMES), "4,8,16", kernels="native")
    gearbox.shift(gearbox.ladder.find(WEIGHTS))
    rows = [row for context in track(LONG, "contexts") for row in of_gears(gearbox, context, trials)]
    times = [cell for name in ("attention", "step", "step, 4,8") for cell in (name, "of 16")]
    return Found({"kv_cost": table(["context", "gear", "MB a step", "of 16", "of 16, bfloat16", *times], rows)})
