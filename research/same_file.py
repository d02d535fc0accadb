"""SmolLM2's GGUF file in llama.cpp and here, in turn: milliseconds of a token, and what drafts save on either side."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from gearbx_mlx import Lossless
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.files import smollm2

from .lossless import ASSISTANT, Writer, first_prompts, written_in_turn
from .studies import HELD_OUT, Found, ratios, spread, study, table_here

CONTEXT = 2048
server: Any = None  # of llama.cpp, in a child
Write = Callable[[list[int], int], tuple[str, float]]
"""A text after the tokens of a prompt, and the milliseconds of a token."""


def unpacked(file: Path, out: Path) -> Path:
    """The same model in float16: llama.cpp's own type for weights that are not quantized, and all else as it was."""
    import gguf

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        kinds = field.types
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def llama_cpp(file: Path, draft: Path | None = None) -> Write:
    """What writes greedily in llama.cpp, with a draft model if one is given, in a process of its own.

    Where threads of several models share a process, libgomp lets them sleep at every barrier.

    Raises:
        GearbxError: llama.cpp is not installed.
    """
    if find_spec("xllamacpp") is None or find_spec("gguf") is None:
        raise GearbxError("llama.cpp is not installed: pip install xllamacpp gguf")
    child = ProcessPoolExecutor(1, get_context("spawn"), initializer=begin, initargs=(file, draft))
    return lambda prompt, tokens: child.submit(answered, prompt, tokens).result()


def begin(file: Path, draft: Path | None) -> None:
    """Load the model, in the child."""
    import xllamacpp

    global server
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity, params.warmup = CONTEXT, 1, -1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    if draft is not None:
        params.speculative.draft.mparams.path = str(draft)
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(params)


def answered(prompt: list[int], tokens: int) -> tuple[str, float]:
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "cache_prompt": False}
    answer = server.handle_completions(asked)
    times = answer["timings"]
    return answer["choices"][0]["text"], times["predicted_ms"] / times["predicted_n"]


def here(writer: Writer, way: Callable[[list[int], int], tuple[list[int], float]]) -> Write:
    def write(prompt: list[int], tokens: int) -> tuple[str, float]:
        written, seconds = way(prompt, tokens)
        ends = writer.tokenizer.eos_token_ids
        return writer.tokenizer.decode([token for token in written if token not in ends]), 1000 * seconds

    return write


@study("docs/performance.md", minutes=10)
def same_file(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """A token of SmolLM2 in llama.cpp and here, from the same file, in turn.

    The file is Q4_1. Both sides unpack it to 16 bits too, and draft for those with 4 bits. The time of the prompt does
    not count.

    Args:
        prompts: Files: one per line, or JSON Lines as of GSM8K.
        num_prompts: Of each file.
        pairs: Trials of a prompt.
    """
    file = smollm2.installed()
    plain = Writer("smollm2", "4,16", "planes", Lossless())
    drafted = Writer("smollm2", "4,16", "planes", Lossless(), calibrated=True)
    with tempfile.TemporaryDirectory() as directory:
        whole = unpacked(file, Path(directory) / "f16.gguf")
        ways = {
            "llama.cpp, float16": llama_cpp(whole),
            "llama.cpp, Q4_1": llama_cpp(file),
            "llama.cpp, float16, drafts by Q4_1": llama_cpp(whole, file),
            "here, bfloat16": here(plain, plain.alone),
            "here, bfloat16, lossless": here(plain, plain.lossless),
            "here, bfloat16, lossless, calibrated": here(drafted, drafted.lossless),
        }
        asked = first_prompts(plain.tokenizer, prompts, num_prompts)
        found = written_in_turn(ways, asked, max_tokens, pairs)
    first = found[next(iter(ways))]
    rows = [
        [
            name,
            spread([time for texts in trials for _, time in texts]),
            spread(
                [ratio for theirs, ours in zip(first, trials) for ratio in ratios(times_of(theirs), times_of(ours))]
            ),
            f"{sum(theirs[0][0] == ours[0][0] for theirs, ours in zip(first, trials))} of {len(asked)}",
        ]
        for name, trials in found.items()
    ]
    title = f"smollm2, {len(asked)} prompts, {max_tokens} tokens"
    head = [title, "ms a token: median (range)", "times as fast", "texts"]
    return Found({"same_file": table_here(head, rows)}, found)


def times_of(trials: list[tuple[str, float]]) -> list[float]:
    return [time for _, time in trials]
