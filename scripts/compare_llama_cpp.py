"""Time gears and llama.cpp at the same bits: one random Llama, in turn within one run.

    pip install llama-cpp-python gguf
    python scripts/compare_llama_cpp.py --shape 1024x24

The script writes the model as GGUF in f16, q8_0 and q4_0 to a temporary directory. It compares only speed: the weights
are the same random numbers, but their order within a head is not llama.cpp's, so the texts differ.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gearbx_mlx.commands.benchmark.decode import decode_seconds, random_llama
from gearbx_mlx.commands.benchmark.kernels import GIBIBYTE, GIGABYTE, native_module, timed
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.kernels.names import ACTIVATIONS
from gearbx_mlx.telemetry.summary import as_json

TYPES = {4: "Q4_0", 8: "Q8_0", 16: "F16"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(path: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    owner = path.removesuffix(".weight")
    if owner in NAMES:
        return f"{NAMES[owner]}.weight"
    number, _, rest = owner.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest]}.weight"


def write_gguf(model: Any, file: Path, kind: str) -> None:
    """Write every matrix in a type of llama.cpp, and norms in float32."""
    import gguf

    args, target = model.args, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_rope_dimension_count(args.hidden_size // args.num_attention_heads)
    writer.add_vocab_size(args.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for path, array in tree_flatten(model.parameters()):
        weight = np.array(array.astype(mx.float32))
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(path), weight)
        else:
            writer.add_tensor(gguf_name(path), gguf.quants.quantize(weight, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_clock(file: Path, threads: int, tokens: int) -> Callable[[], float]:
    """A function that times a few tokens after a short prompt, in seconds per token."""
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=256, n_threads=threads, n_threads_batch=threads, use_mmap=False, verbose=False)

    def seconds() -> float:
        model.reset()
        model.eval([1, 2, 3])
        start = time.perf_counter()
        for token in range(tokens):
            model.eval([token + 4])
        return (time.perf_counter() - start) / tokens

    return seconds


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each width, with tokens per second of both, and their ratio over the trials."""
    native = native_module()
    threads = native.threads()
    model = random_llama(args.shape)
    words = mx.full((GIBIBYTE // 4,), 1, dtype=mx.uint32)
    mx.eval(words)
    rows = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True), transient=True) as progress:
        clocks, sizes = {}, {}
        for bits, kind in progress.track(TYPES.items(), description="writing GGUF"):
            file = Path(folder) / f"{kind}.gguf"
            write_gguf(model, file, kind)
            sizes[bits] = file.stat().st_size
            clocks[bits] = llama_cpp_clock(file, threads, args.tokens)
            file.unlink()
        gearbox = Gearbox(model, "4,8,16", kernels="native", activations=args.activations)
        for bits, clock in progress.track(clocks.items(), description="timing"):
            gearbox.shift(bits)
            decode_seconds(model, 2), clock()  # a warm-up
            ours, theirs, bandwidths = [], [], []
            for _ in range(args.trials):
                bandwidths.append(words.nbytes / timed(lambda: native.read_sum(words)) / GIGABYTE)
                ours.append(decode_seconds(model, args.tokens))
                theirs.append(clock())
            ratios = [b / a for a, b in zip(ours, theirs)]
            rows.append(
                {
                    "bits": bits,
                    "llama_cpp_type": TYPES[bits].lower(),
                    "tokens_per_second": 1 / statistics.median(ours),
                    "llama_cpp_tokens_per_second": 1 / statistics.median(theirs),
                    "ratio": statistics.median(ratios),
                    "spread": [min(ratios), max(ratios)],
                    "weight_bytes_per_token": gearbox.weight_bytes_per_token(gearbox.gear),
                    "llama_cpp_file_bytes": sizes[bits],
                    "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
                    "threads": threads,
                    "trials": args.trials,
                }
            )
    return rows


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1024x24", help="WIDTHxLAYERS of the random Llama. Default: 1024x24")
    parser.add_argument("--tokens", type=int, default=16, help="Tokens in a trial. Default: 16")
    parser.add_argument("--trials", type=int, default=5, help="Default: 5")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="int16", help="Of our gears. Default: int16")
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    try:
        import gguf
        import llama_cpp
    except ImportError as error:
        sys.exit(f"{error.name} is not installed: pip install llama-cpp-python gguf")
    rows = measure(args)
    shown = ("bits", "llama_cpp_type", "tokens_per_second", "llama_cpp_tokens_per_second", "ratio", "spread")
    table = Table(*shown, box=box.MARKDOWN)
    for row in rows:
        values = [row[name] for name in shown]
        table.add_row(
            *(
                "-".join(f"{v:.2f}" for v in x)
                if isinstance(x, list)
                else f"{x:.3g}"
                if isinstance(x, float)
                else str(x)
                for x in values
            )
        )
    Console(width=140).print(table)
    versions = {"llama_cpp_python": llama_cpp.__version__, "gguf": getattr(gguf, "__version__", "")}
    if args.json:
        write_text(args.json, as_json({"rows": rows} | versions))


if __name__ == "__main__":
    main()
