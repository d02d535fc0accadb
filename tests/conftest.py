import chosen_device  # noqa: F401 - mlx-lm keeps the device that it finds

# isort: split
import atexit
import copy
import dataclasses
import functools
import gc
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import object_store
import platformdirs
import pytest
from architectures import CONFIGS, as_initialised
from architectures import VOCABULARY as VOCABULARY
from hypothesis import settings
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from gearbx_mlx import Gearbox, GearbxError, Pair, load, stream_generate
from gearbx_mlx.cli import signals
from gearbx_mlx.compat import loops
from gearbx_mlx.decoding.sampling import reader_of
from gearbx_mlx.errors import one_line
from gearbx_mlx.files import smollm2
from gearbx_mlx.kernels import cpu, dispatch, metal
from gearbx_mlx.kernels.bit_planes import plane_shifts, unpack_mlx_codes
from gearbx_mlx.kernels.compiler import Unavailable, find_compiler, instructions
from gearbx_mlx.loading import DEMO_MODEL

# Where programs that a test starts find what tests share. The folders here have the names of packages, such as lm_eval,
# and must not be taken for one that is not installed.
TESTS = Path(__file__).parent
HELD_OUT = TESTS / "data" / "gsm8k_held_out.jsonl"
PATHS = [str(TESTS), str(TESTS / "helpers")]
sys.path.remove(PATHS[0])

# The hundreds of commands that tests start compile the package once, not each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A command ends at a signal that comes before it has begun. Here a signal is for the tests' process.
signals.end_at_once = lambda: None

# The certificates that a client trusts are the same for all clients, and take 20 ms to read.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# What a test writes need not survive a power failure.
os.fsync = lambda descriptor: None

# Only tests of the tuner measure which kernels are fastest; they write to a directory of their own.
os.environ["GEARBX_TUNE"] = "0"
# The programs that tests start read startup/sitecustomize.py.
if "GEARBX_TEST_LISTS" not in os.environ:  # else a worker, which has these from the process that started it
    os.environ["GEARBX_TEST_LISTS"] = tempfile.mkdtemp(prefix="gearbx-lists-")
    atexit.register(shutil.rmtree, os.environ["GEARBX_TEST_LISTS"], ignore_errors=True)
    paths = [str(TESTS / "startup"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
# Bases that were calibrated on this machine would change what drafts choose.
os.environ["GEARBX_BASES"] = tempfile.mkdtemp(prefix="gearbx-bases-")
atexit.register(shutil.rmtree, os.environ["GEARBX_BASES"], ignore_errors=True)

# An example's time says nothing on a machine with other users. The examples are the same in every run, so that
# a failure comes from a change; HYPOTHESIS_SEARCH=1 looks for others.
settings.register_profile("gearbx", deadline=None, derandomize="HYPOTHESIS_SEARCH" not in os.environ)
settings.load_profile("gearbx")

PROMPT = mx.array([[1, 5, 9, 2, 7]])

# Equal bits are promised for as many vectors as native CPU kernels take: on a Mac 16; MLX computes larger numbers.
MANY_VECTORS = pytest.mark.skipif(
    dispatch.MAX_NATIVE_VECTORS is not None,
    reason="on a Mac so many vectors are MLX's, whose kernels there promise no bits",
)


NO_KERNELS = "THE NATIVE KERNELS WERE NOT CHECKED: {}"


def active_memory() -> int:
    """Bytes of MLX's arrays, without those of earlier tests that wait for Python's collector."""
    gc.collect()
    return mx.get_active_memory()


def up_to(vectors: int) -> int:
    """This number of vectors, or as many as native CPU kernels take here."""
    return min(vectors, dispatch.MAX_NATIVE_VECTORS or vectors)


# One of each kind that has a cache of keys and values and no state; tests/helpers/architectures has all classes.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma3", "phi3", "mixtral", "gpt_neox")


# Keywords of mlx-lm's `stream_generate`, which every mode takes.
KEYWORDS = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "sampled": {"sampler": make_sampler(0.8, top_p=0.9)},
    "penalty": {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "rotating cache": {"max_kv_size": 12},
    "quantized cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4},
    "small prefill": {"prefill_step_size": 4},
}
WIDE = {"sliding_window": 64}  # which short texts do not fill
CHANGES = {
    "gemma3_text": WIDE,
    "gemma3": {"text_config": CONFIGS["gemma3"]["text_config"] | WIDE},
    "deepseek_v3": {"first_k_dense_replace": 2},  # on a CPU, MLX computes experts in float32 only
}


def tiny_model(architecture: str = "llama", seed: int = 0, dtype: mx.Dtype = mx.float32, **change: object) -> nn.Module:
    """A random instance of one of mlx-lm's classes, as it is initialised."""
    return as_initialised(architecture, seed, dtype, **(CHANGES.get(architecture, {}) | change))


def heavy(*shape: int, seed: int = 0, scale: float = 0.02) -> mx.array:
    """Student t with 4 degrees of freedom."""
    return mx.array((np.random.default_rng(seed).standard_t(4, shape) * scale).astype(np.float32))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear | SwitchLinear)}


def layer_with(weight: mx.array, bias: bool = False) -> nn.Linear:
    """A linear layer with this weight."""
    layer = nn.Linear(1, len(weight), bias)
    layer.weight = weight
    return layer


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def same_weights(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]).item() for name in a)


def same_arrays(ours: Iterable[mx.array], theirs: Iterable[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


matrix = functools.partial(normal, scale=0.02)  # of weights


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def stack_weights(weights, scales, biases, widths, group_size, rest=0) -> tuple[np.ndarray, np.ndarray]:
    """What a stack stands for in float64, and the sizes of its terms."""
    total, sizes = 0.0, 0.0
    for words, bias, width, shift in zip(weights, biases, widths, plane_shifts(widths)):
        codes = np.array(unpack_mlx_codes(words, width)).astype(np.float64)
        s, z = (np.repeat(float64(a), group_size, axis=1) for a in (scales, bias))
        total = total + (s * codes + z) * 2.0**-shift
        sizes = sizes + (np.abs(s) * codes + np.abs(z)) * 2.0**-shift
    return total, sizes


def assert_products_close(y: mx.array, x: mx.array, weights: np.ndarray, sizes: np.ndarray) -> None:
    """y = x @ weights.T within the rounding of float32 sums, eight side by side; sizes bound the terms."""
    exact = float64(x) @ weights.T
    bound = (weights.shape[1] / 8 + 16) * 2.0**-24 * (np.abs(float64(x)) @ sizes.T)
    assert np.all(np.abs(float64(y) - exact) <= bound)


def every_gear(*boxes: Gearbox, gears: Iterable = ()) -> Iterator:
    """Shift gearboxes to each gear of the first one in turn, or to each of `gears`, and yield it."""
    for gear in gears or boxes[0].ladder:
        for box in boxes:
            box.shift(gear)
        yield gear


@pytest.fixture
def on_gpu(monkeypatch):
    """MLX and mlx-lm compute on the GPU; without one, the test is skipped."""
    if not mx.is_available(mx.Device(mx.gpu)):
        pytest.skip("MLX has no GPU here")
    try:
        mx.eval(mx.matmul(mx.ones((2, 2)), mx.ones((2, 2)), stream=mx.gpu))
    except RuntimeError as error:  # as the paravirtual GPU of a hosted Mac
        pytest.skip(f"{mx.device_info()['device_name']} WAS NOT CHECKED: it cannot compute ({one_line(error)})")
    before = mx.default_device()
    mx.set_default_device(mx.gpu)
    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "generation_stream", mx.new_thread_local_stream(mx.gpu))
    yield
    mx.set_default_device(before)


@pytest.fixture
def on_metal(on_gpu):
    """Like `on_gpu`, where the GPU is a Mac's."""
    if not metal.available():
        pytest.skip("not run on Metal, which is not here")


@pytest.fixture
def compiled():
    """Skips the test where there are no native kernels."""
    if cpu.why_not() is not None:
        pytest.skip(NO_KERNELS.format(cpu.why_not()))


@pytest.fixture
def afresh(monkeypatch):
    """The kernels are looked up again in the test and after it."""
    mx.compile(mx.abs)(mx.array(0.0))  # MLX looks for its own compiler once in a process: before a test hides it
    cpu._kernels_or_reason.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cpu._kernels_or_reason.cache_clear()


@pytest.fixture
def own_cache(monkeypatch, tmp_path) -> Path:
    """The user's cache is empty. The kernels, which take most of a minute to compile, come from the other one."""
    cpu.why_not()
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def native():
    """The compiled kernels. Without a compiler, a test that needs them is skipped; if it fails, so does the test."""
    if reason := cpu.why_not():
        pytest.fail(reason)  # which becomes a skip below
    return cpu.native()


@functools.cache
def no_compiler() -> str:
    """Why there is no compiler here; empty if there is one."""
    try:
        find_compiler()
    except Unavailable as reason:
        return str(reason)
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Without a compiler, a test that fails for lack of it is skipped. If the compiler fails, the test fails too."""
    report = yield
    if report.failed and (reason := no_compiler()) and reason in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.location[1], NO_KERNELS.format(reason)
    return report


MARKED = re.compile(r"^pytestmark = (\[.*?\]|.*?)$", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path, config):
    """Do not even import a file whose tests all have a marker that `-m "not (...)"` leaves out.

    Some need packages that take seconds to import.
    """
    asked = config.option.markexpr
    if collection_path.suffix == ".py" and asked.startswith("not "):
        marked = re.findall(r"mark\.(\w+)", " ".join(MARKED.findall(collection_path.read_text(encoding="utf-8"))))
        return True if {*marked} & {*re.findall(r"\w+", asked)} else None
    return None


# Files with the longest tests. If one of these began last, one core would work while the others wait.
LONGEST = ("test_native_cores.py", "test_build.py", "test_documents.py", "test_scripts.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of the LONGEST files come first.

    Of a function with the mark `some(n)`, n cases run by default, evenly spread; the others get the mark `matrix`.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("some"):
            cases[item.nodeid.split("[")[0], mark.args[0]].append(item)
    for (_, n), of_one in cases.items():
        chosen = {len(of_one) * i // n for i in range(n)}
        for index, item in enumerate(of_one):
            if index not in chosen:
                item.add_marker(pytest.mark.matrix)


def pytest_sessionstart(session):
    """Compile the native kernels before the workers start, which would otherwise wait for each other."""
    try:
        instructions()
    except GearbxError as error:
        pytest.exit(str(error), pytest.ExitCode.USAGE_ERROR)
    no_compiler()  # before a test hides the compiler, whose failure would then count as a skip
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        object_store.forget_unused()
        cpu.why_not()


def pytest_collection_finish():
    """Python's collector need not look at the thousands of tests again, each time that it runs."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Skips are quiet under -q; this names those that leave a kind of machine unchecked."""
    reasons = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if report.longrepr}
    for reason in sorted(reason.removeprefix("Skipped: ") for reason in reasons if " NOT CHECKED" in reason):
        terminalreporter.write_line(reason, red=True, bold=True)


def save_model(model, path: Path) -> None:
    """Write a model as a directory that mlx-lm loads, with the demo model's tokenizer."""
    path.mkdir()
    on_disk(model, path)
    (path / "config.json").write_text(json.dumps(vars(model.args)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, path)


def contents(directory: Path) -> dict[str, bytes]:
    """Return what is in the files of a directory, by name."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def on_disk(model, directory: Path) -> dict:
    """Arguments of a gearbox whose top gear is read again from the model's weights, which are saved in a directory."""
    mx.save_safetensors(str(directory / "model.safetensors"), weights_of(model))
    return {"residency": "disk", "checkpoint": directory}


def mlx_lm_loop(gearbox):
    """mlx-lm's `stream_generate`, which makes log-probabilities as a model with this gearbox does."""
    return loops.streaming_with(reader_of(gearbox).logsumexp)


def stream_pair(small, large, tokenizer, prompt, max_tokens=256, **keywords):
    """stream_generate in mode pair, with the mode's settings among the keywords."""
    renamed = {"min_duration": "min_gear_duration", "initial": "initial_gear"}
    settings = {renamed.get(name, name): value for name, value in keywords.items()}
    own = {item.name for item in dataclasses.fields(Pair)} & settings.keys()
    mode = Pair(small, **{name: settings.pop(name) for name in own})
    return stream_generate(large, tokenizer, prompt, max_tokens, mode=mode, **settings)


class Clock:
    """A clock that a test moves on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Script:
    """A gate that follows a list of gears, again and again."""

    def __init__(self, gears: Sequence[int]):
        self.gears = gears

    def reset(self, gear: int) -> None:
        self.left = cycle(self.gears)

    def peek(self, level: float) -> int:
        return 0

    def update(self, reading: object) -> int:
        return next(self.left)


def written(responses) -> list[tuple]:
    """Return what two texts are compared by: token, log-probabilities, text and reason of the end, of each."""
    return [(r.token, np.array(r.logprobs.astype(mx.float32)), r.text, r.finish_reason) for r in responses]


def assert_same_text(ours: list[tuple], theirs: list[tuple]) -> None:
    """Two lists of `written` are equal, log-probabilities bit for bit."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert (mine[0], mine[2], mine[3]) == (other[0], other[2], other[3])
        assert np.array_equal(mine[1], other[1])


def read_once(load):
    """mlx-lm's `load` of tokenizers, which reads each file once; tests get copies."""
    found = {}

    def load_again(path, *args, **keywords):
        files = [file for file in sorted(path.iterdir()) if file.is_file() and file.suffix != ".safetensors"]
        key = repr((args, keywords)), *((file.name, file.read_bytes()) for file in files)
        if key not in found:
            found[key] = load(path, *args, **keywords)
        tokenizer = copy.copy(found[key])
        tokenizer._tokenizer, tokenizer._eos_token_ids = copy.copy(tokenizer._tokenizer), {*tokenizer._eos_token_ids}
        return tokenizer

    return load_again


mlx_lm.utils._load_tokenizer = read_once(mlx_lm.utils._load_tokenizer)


@pytest.fixture
def tiny() -> nn.Module:
    return tiny_model()


def loaded_demo() -> SimpleNamespace:
    model, tokenizer = mlx_lm.load(str(DEMO_MODEL))
    return SimpleNamespace(model=model, tokenizer=tokenizer, path=DEMO_MODEL)


@pytest.fixture(scope="module")
def demo():
    """The model that ships and its tokenizer, one for each file of tests, which leave it in the top gear."""
    return loaded_demo()


@pytest.fixture(scope="module")
def tokenizer(demo):
    return demo.tokenizer


@pytest.fixture(scope="session", autouse=True)
def nearest_codes():
    """Conversions choose no codes by a text, and measure no KL, unless a test asks for it: that takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        settings = import_module("gearbx_mlx.convert").ConvertSettings
        patch.setattr(settings, "calibrates", property(lambda self: self.conversion.asks_text))
        patch.setattr(settings, "measures", False)
        yield patch


@pytest.fixture(scope="session")
def smollm2_model():
    """A real language model and its tokenizer, where its package is installed."""
    try:
        smollm2.installed_file()
    except GearbxError:
        pytest.skip(f"SMOLLM2 WAS NOT CHECKED: {smollm2.INSTALL_IT}")
    return load("smollm2")


@pytest.fixture(scope="module")
def demo_gearbox(demo):
    return Gearbox(demo.model, "3,16", kernels="auto")


@pytest.fixture
def geared_demo(demo_gearbox):
    """The demo model with a gearbox that all tests of a file share, and that each leaves in the top gear."""
    yield demo_gearbox
    demo_gearbox.shift("high")


@pytest.fixture
def fresh_demo():
    return loaded_demo()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command, or a module of research/ by its name, as a user does, in this process.

    Returns exit status, stdout, stderr without lines of progress.
    """
    monkeypatch.setattr("gearbx_mlx.cli.terminal.SHORT_SECONDS", 1e6)  # otherwise a slow machine has more lines

    def run(name: str, *arguments: object) -> SimpleNamespace:
        main = import_module(name if "." in name else f"gearbx_mlx.{name}").main
        monkeypatch.setattr(sys, "argv", [f"gearbx_mlx.{name}", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        code = stopped.value.code
        return SimpleNamespace(status=code if isinstance(code, int) else 0, out=captured.out, err=captured.err)

    return run


def read_trace(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def succeeds(command):
    """Run a command that must not fail; as `command`."""

    def run(*arguments: object) -> SimpleNamespace:
        done = command(*arguments)
        assert done.status == 0, done.err
        return done

    return run


@pytest.fixture
def generated(succeeds, tmp_path):
    """Run `generate`, which must not fail; as `command`, and its `summary` and `trace`."""

    def run(*flags: object) -> SimpleNamespace:
        summary, trace = tmp_path / "summary.json", tmp_path / "trace.jsonl"
        done = succeeds("generate", *flags, "--summary", summary, "--trace", trace)
        done.summary = json.loads(summary.read_text())
        done.trace = read_trace(trace)
        return done

    return run


HOLDING = """
import sys, pathlib
from gearbx_mlx.files.journal import Journal
from gearbx_mlx.files.writing import new_directory, replacing, work_directory
path = pathlib.Path(sys.argv[1])
{begin}
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holding():
    """Start a process that begins a block over a path, and stays inside of it until its stdin is closed; return it."""
    started = []

    def start(begin: str, path: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDING.format(begin=begin), str(path)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout.read(5) == b"ready"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def held_out() -> list[dict]:
    """Problems of the GSM8K test set (MIT), which the demo model never saw."""
    return read_trace(HELD_OUT)
