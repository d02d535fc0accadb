"""A device in virtual time: what a GPU would do while this process builds graphs, queues passes and reads tokens.

Python's clock is the processor time of this thread, in the unit of a pass that Python builds here, which is given for a
Mac. The device's clock advances by given milliseconds for each pass. Evaluation by MLX's CPU backend does not count:
launches are encoded in a given time, the device starts with the first full command buffer, and a thread that is ten
buffers ahead waits, as in MLX's Metal backend. `python -m stand_in_device`, in this folder, prints the idle shares; a
chip and sizes as arguments limit them.
"""

import itertools
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx
from conftest import PROMPT, tiny_model
from lossless_texts import endless
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, Lossless, stream_generate
from gearbx_mlx.decoding import sampling
from gearbx_mlx.decoding.drafters import built_ahead
from gearbx_mlx.decoding.response import MODEL

LAUNCHES_A_LAYER, LAUNCHES_A_BUFFER, BUFFERS = 17, 40, 10  # 480 launches in 28 layers; MLX's limits on Metal
ENCODE, READ = 0.0025, 0.1  # ms per launch, and until a waiting thread continues: assumed


@dataclass(frozen=True)
class Speeds:
    """Milliseconds of a pass: plain, for a drafted token, and to verify two rows; each other row adds `row`.

    host: of Python, to build a pass of 28 layers.
    """

    layers: int
    plain: float
    draft: float
    two: float
    row: float
    host: float = 1.9

    def of(self, rows: int) -> float:
        return self.plain if rows == 1 else self.two + self.row * (rows - 2)

    def scaled(self, factor: float, layers: int) -> "Speeds":
        times = (factor * each for each in (self.plain, self.draft, self.two, self.row))
        return Speeds(layers, *times, host=self.host)


CHIPS = {  # with billions of weights: estimates from reading MLX's sources, and from memory bandwidth
    "M4 Pro": (Speeds(28, 29, 9.9, 30.5, 1.2), 3.21),
    "M1": (Speeds(28, 110, 33, 135, 5, host=3.0), 3.21),
    "M4 Max": (Speeds(32, 34, 11.4, 35, 1.3), 8.03),
}
SIZES = {"1B": (1.24, 16), "3B": (3.21, 28), "8B": (8.03, 32)}  # billions of weights, layers


def speeds_of(chip: str, size: str) -> Speeds:
    """Speeds in proportion to the weights."""
    speeds, weights = CHIPS[chip]
    return speeds.scaled(SIZES[size][0] / weights, SIZES[size][1])


class StandIn:
    """A device that takes the passes of a gearbox's model.

    Attributes:
        passes, reads: passes that were queued, and waits of Python.
        idle, busy: milliseconds of the device.
    """

    def __init__(self, gearbox: Gearbox, speeds: Speeds, unit: float):
        self._gearbox, self._speeds, self._scale = gearbox, speeds, speeds.host / unit
        self._built: list[int] = []  # rows of passes of the top gear that are not queued yet
        self._waited = self._ends = 0.0
        self.count_anew()

    def count_anew(self) -> None:
        self.passes = self.reads = 0
        self.idle = self.busy = 0.0

    def now(self) -> float:
        return self._scale * time.thread_time() + self._waited

    def seconds(self) -> float:
        return self.now() / 1000

    @property
    def is_busy(self) -> bool:
        return self._ends > self.now()

    def wait_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())

    def queue(self) -> None:
        """Start the pass of the top gear that was built last; else one of a draft."""
        is_draft = not self._built
        took = self._speeds.draft if is_draft else self._speeds.of(self._built.pop())
        self._built.clear()
        launches = LAUNCHES_A_LAYER * self._speeds.layers
        first = self.now() + ENCODE * LAUNCHES_A_BUFFER
        self.idle += max(0.0, first - self._ends) if self._ends else 0.0
        self._ends, self.busy = max(first, self._ends) + took, self.busy + took
        self.passes += 1
        self._waited += ENCODE * launches
        self.wait_until(self._ends - took * BUFFERS * LAUNCHES_A_BUFFER / launches)

    def read(self) -> None:
        if self._built:
            self.queue()
        self.reads += 1
        self.wait_until(self._ends + READ)

    def apart(self, function):
        """Return a function whose time does not count."""

        def call(*arguments):
            start = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._waited -= self._scale * (time.thread_time() - start)

        return call

    @contextmanager
    def running(self):
        """Queue and read on this device in the context."""
        model, read, queue = self._gearbox.model, self.apart(sampling.wait_for), self.apart(mx.async_eval)
        kind = type(model)

        def call(module, inputs, *arguments, **keywords):
            if self._gearbox.gear == self._gearbox.ladder.top:
                self._built.append(inputs.shape[1])
            return kind.__call__(module, inputs, *arguments, **keywords)

        def queued(*arrays):
            queue(*arrays)
            self.queue()

        def waited(*arguments):
            found = read(*arguments)
            self.read()
            return found

        model.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        try:
            with (
                mock.patch.object(sampling, "wait_for", waited),
                mock.patch.object(mx, "async_eval", queued),
                mock.patch.object(built_ahead, "clock", self.seconds),
            ):
                yield self
        finally:
            model.__class__ = kind


def built_in(gearbox: Gearbox, speeds: Speeds) -> float:
    """Return the seconds in which Python builds a pass of 28 layers here."""
    cache, seconds = make_prompt_cache(gearbox.model), list[float]()
    for token in range(40):
        start = time.thread_time()
        logits = gearbox.model(mx.array([[token]]), cache=cache)
        seconds.append(time.thread_time() - start)
        mx.eval(logits)
    return statistics.median(seconds) * 28 / speeds.layers


def rounds_on(speeds: Speeds, tokens: int = 160, length: int = 3) -> tuple[StandIn, list[Any]]:
    """Return the device after rounds of a random model with this number of layers, and their responses."""
    model = tiny_model(dtype=mx.bfloat16, num_hidden_layers=speeds.layers, tie_word_embeddings=True)
    gearbox = Gearbox(model, "4,16", format="affine", kernels="mlx", dtype="bfloat16")
    mode = Lossless(draft_length=length, lookup_tokens=0)
    with StandIn(gearbox, speeds, built_in(gearbox, speeds)).running() as device:
        run = stream_generate(model, endless(), PROMPT[0].tolist(), tokens, gearbox=gearbox, mode=mode)
        for _ in range(20):  # kernels compile
            next(run)
        device.count_anew()
        return device, [*run]


def main() -> None:
    """Print the share of a round in which the device is idle."""
    for chip, size in itertools.product(sys.argv[1:2] or CHIPS, sys.argv[2:] or SIZES):
        device, responses = rounds_on(speeds_of(chip, size))
        rounds = sum(response.source == MODEL for response in responses)
        print(
            f"{chip:7} {size}: idle {device.idle / (device.idle + device.busy):6.2%}, "
            f"{device.idle / rounds:.2f} ms of a round of {(device.idle + device.busy) / rounds:.1f} ms; "
            f"{device.reads / rounds:.2f} reads, {device.passes / rounds:.2f} passes"
        )


if __name__ == "__main__":
    main()
