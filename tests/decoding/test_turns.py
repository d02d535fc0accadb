"""Several texts with one gearbox: each is the same as alone, in turns and in threads."""

import subprocess
import sys
import textwrap
from itertools import islice, zip_longest
from pathlib import Path

import pytest
from conftest import PATHS, Script, tiny_model

from gearbx_mlx import Gearbox, Kickdown, Lossless, Observer, Route, Static, TelemetryOnly, stream_generate

PROMPTS = [[1, 5, 9, 2, 7], [3, 8, 4]]


def routes():
    return Route(gate=Script([0, 1, 1]), initial_gear="low"), Route(gate=Script([1, 0]), initial_gear="high")


def modes():
    return [
        routes(),
        (Static("low"), Static("high")),
        (routes()[0], Kickdown(rule=lambda entropy, position, gear: position % 2 == 0)),
        (Lossless(draft_length=2), routes()[1]),
    ]


def begun(model, tokenizer, gearbox, chosen):
    each = zip(PROMPTS, chosen)
    return [stream_generate(model, tokenizer, prompt, 16, mode=mode, gearbox=gearbox) for prompt, mode in each]


def seen(response):
    return response.token, response.gear, response.entropy


def in_turns(texts):
    """Each text, where tokens of both texts alternate."""
    together = zip_longest(*(map(seen, text) for text in texts))
    return [list(text) for text in zip(*together)]


@pytest.mark.some(2)
@pytest.mark.parametrize("number", range(4), ids=["route", "static", "kickdown", "lossless"])
def test_alternating_outputs_equal_single_outputs(demo, number):
    model = tiny_model()
    gearbox = Gearbox(model, "3,16", kernels="mlx")
    alone = [[seen(r) for r in text] for text in begun(model, demo.tokenizer, gearbox, modes()[number])]
    assert alone[0] != alone[1]
    assert in_turns(begun(model, demo.tokenizer, gearbox, modes()[number])) == alone


def test_observed_outputs_name_their_own_gears(demo):
    model = tiny_model()
    observer = Observer(model, "3,16")
    chosen = [TelemetryOnly(**vars(mode)) for mode in routes()]
    alone = [[seen(r) for r in text] for text in begun(model, demo.tokenizer, observer, chosen)]
    assert in_turns(begun(model, demo.tokenizer, observer, chosen)) == alone


def test_dropped_output_frees_gearbox(demo):
    model = tiny_model()
    gearbox = Gearbox(model, "3,16", kernels="mlx")
    first, second = (begun(model, demo.tokenizer, gearbox, routes())[1] for _ in range(2))
    list(islice(first, 3))
    del first
    expected = [seen(r) for r in begun(model, demo.tokenizer, gearbox, routes())[1]]
    assert [seen(r) for r in second] == expected


IN_THREADS = """
    import os, sys, traceback
    from concurrent.futures import ThreadPoolExecutor
    sys.path[:0] = {paths}
    from test_turns import PROMPTS, modes, seen
    import gearbx_mlx
    from gearbx_mlx import Gearbox, stream_generate

    def texts(pool):
        jobs = [pool.submit(write, prompt, mode) for pair in modes() for prompt, mode in zip(PROMPTS, pair)]
        return [job.result() for job in jobs]

    def write(prompt, mode):
        return [seen(r) for r in stream_generate(model, tokenizer, prompt, 16, mode=mode, gearbox=gearbox)]

    status = 1
    try:
        model, tokenizer = gearbx_mlx.load({model!r})
        gearbox = Gearbox(model, "4,16")
        with ThreadPoolExecutor(4) as pool:
            together = texts(pool)
        alone = [write(prompt, mode) for pair in modes() for prompt, mode in zip(PROMPTS, pair)]
        assert together == alone
        assert len(set(map(str, alone))) > 4
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # MLX's threads may abort the process when it ends in another way
"""


@pytest.mark.processes
@pytest.mark.parametrize("geared", [False, True], ids=["original", "geared checkpoint"])
def test_threaded_outputs_equal_single_outputs(command, demo, tmp_path, geared):
    model = demo.path
    if geared:
        model = tmp_path / "geared"
        assert command("convert", "--model", demo.path, "--mlx-path", model, "--gears", "4,16").status == 0
    code = textwrap.dedent(IN_THREADS).format(paths=[str(Path(__file__).parent), *PATHS], model=str(model))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
