"""What routing itself costs: entropy, monitor, gate, a shift that is not needed, and the trace, for one token.

    python scripts/time_routing.py --shape 1024x24

Timed on its own, over and over, beside the tokens of a random Llama: a difference of whole runs would be lost in their
spread. The Llama is held in the lowest gear, of whose time routing is the largest part.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generate_step

from gearbx_mlx import Gearbox, Monitor
from gearbx_mlx.benchmark import random_llama
from gearbx_mlx.decoding.tachometer import Tachometer, entropy_function, single_pass, told
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.routing.gates import ThresholdGate
from gearbx_mlx.telemetry.trace import TraceWriter, record

TOKENS = 16  # in a trial


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1024x24", help="WIDTHxLAYERS. Default: 1024x24")
    parser.add_argument("--gears", default="4,8,16", help="Default: 4,8,16")
    parser.add_argument("--kernels", default="native", help="Default: native")
    parser.add_argument("--trials", type=int, default=20, help="Default: 20")
    return parser.parse_args()


def routed(gearbox, trace):
    """A function that does for one token what mode route adds to mlx-lm's own work."""
    monitor, ladder = Monitor(vocabulary(gearbox.model)), gearbox.ladder
    gate = ThresholdGate((98.0, 99.0))  # beyond any entropy: the gear is kept
    gate.reset(0)
    count = iter(range(10**9))

    def do(tachometer):
        reading = tachometer.readings.popleft()
        entropy = float(reading.entropy)
        seen = monitor.update(entropy)
        gearbox.shift(ladder[gate.update(seen)])
        gearbox.prepare(ladder[gate.peek(seen.forecast)])
        response = GenerationResponse("text", 1, None, False, 1, 1.0, 1, 1.0, 0.0)
        trace.write(record(next(count), told(response, reading.step, entropy, seen.mean, reading.step.gear)))

    return do


def main():
    args = parse_arguments()
    gearbox = Gearbox(random_llama(args.shape), args.gears, kernels=args.kernels)
    low = gearbox.ladder[0]
    gearbox.shift(low)
    logprobs = mx.random.normal((1, vocabulary(gearbox.model)))
    mx.eval(logprobs)
    tachometer = Tachometer(lambda x: x, lambda: single_pass(gearbox, gearbox.gear), entropy_function(gearbox))
    tokens = generate_step(mx.array([1, 2, 3]), gearbox.model, max_tokens=-1)
    token_seconds, routing_seconds = [], []
    with tempfile.TemporaryDirectory() as folder, TraceWriter(Path(folder) / "trace.jsonl") as trace:
        route = routed(gearbox, trace)
        for _ in range(args.trials + 1):
            begun = time.perf_counter()
            list(islice(tokens, TOKENS))
            between = time.perf_counter()
            for _ in range(TOKENS):
                tachometer(logprobs)
                route(tachometer)
            routing_seconds.append((time.perf_counter() - between) / TOKENS)
            token_seconds.append((between - begun) / TOKENS)
    parts = [a / b for a, b in zip(routing_seconds[1:], token_seconds[1:])]  # the first one is a warm-up
    result = {
        "shape": args.shape,
        "gear_bits": low.bits,
        "kernels": "native" if gearbox.kernels.native else "mlx",
        "token_milliseconds": 1000 * statistics.median(token_seconds[1:]),
        "routing_milliseconds": 1000 * statistics.median(routing_seconds[1:]),
        "part": statistics.median(parts),
        "spread": [min(parts), max(parts)],
        "trials": args.trials,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
