"""Standard streams that are closed, full, broken or cannot encode every character; signals that end a run."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import read_trace
from mlx_lm.models import llama
from scripted_model import save_endless

from gearbx_mlx.cli.signals import in_whole, run_to_end
from gearbx_mlx.gears.discovery import only_shapes
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.telemetry.trace import TraceWriter

GENERATE = [sys.executable, "-m", "gearbx_mlx.generate", "-m", "8"]
MODES = {
    "route": (),
    "kickdown": ("--mode", "kickdown", "--gears", "4,16"),
    "lossless": ("--mode", "lossless"),
    "static": ("--mode", "static", "--gear", "low"),
    "pair": ("--small-model", DEMO_MODEL, "--thresholds", 2),
    "telemetry-only": ("--mode", "telemetry-only"),
    "a draft model": ("--mode", "lossless", "--draft-model", DEMO_MODEL),
}
NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
NO_SPACE = "error: standard output: cannot be written (No space left on device); use another destination"


def run_in_shell(redirection: str, *flags: object):
    """A short text, with stdin, stdout or stderr redirected as by a shell."""
    line = ["bash", "-c", f'exec "$0" "$@" {redirection}', *GENERATE, *map(str, flags)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def run_python(*arguments: str, **how: object):
    return subprocess.run([sys.executable, *arguments], **{"capture_output": True, "text": True, "timeout": 60} | how)


def assert_quiet(err: str) -> None:
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> list[str]:
    """The command for a text that does not end by itself."""
    model = tmp_path_factory.mktemp("models") / "endless"
    save_endless(model)
    flags = ["--ignore-chat-template", "-p", "KING:", "-m", "100000", "--max-kv-size", "256", "--temp", "1.5"]
    return [*GENERATE[:3], "--model", str(model), *flags, "--seed", "1"]


class TestClosedAndFull:
    @pytest.mark.slow
    def test_closed_stdout_is_refused(self):
        done = run_in_shell(">&-")
        assert done.returncode == 1
        said = "error: standard output: cannot be written (it is closed); use another destination"
        assert done.stderr.splitlines()[-1] == said

    @pytest.mark.slow
    def test_closed_stderr_loses_only_messages(self):
        done = run_in_shell("2>&-")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == run_in_shell("2>/dev/null").stdout != ""

    @NEEDS_FULL
    def test_full_stdout_of_help(self):
        done = run_in_shell(">/dev/full", "--help")
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, NO_SPACE)

    @pytest.mark.slow
    @NEEDS_FULL
    @pytest.mark.parametrize("flag", ["--trace", "--summary"])
    def test_a_full_file_is_named(self, flag):
        done = run_in_shell("", flag, "/dev/full")
        assert done.returncode == 2
        said = "error: /dev/full: cannot be written (No space left on device); make room or choose another place"
        assert said in done.stderr
        assert done.stderr.count("error") == 1
        assert_quiet(done.stderr)


class TestPipes:
    @pytest.mark.processes
    def test_closed_reader_ends_run_and_keeps_trace(self, endless, tmp_path):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*endless, "--mode", "route", "--trace", str(tmp_path / "t.jsonl")], **pipes) as process:
            process.stdout.read(1)  # like head -c1
            process.stdout.close()
            err = process.stderr.read()
            assert process.wait(timeout=60) == 141
        assert [line for line in err.splitlines() if not line.startswith(b"[transformers]")] == []
        assert len(read_trace(tmp_path / "t.jsonl")) > 1

    @pytest.mark.processes
    def test_trace_with_closed_reader_is_named(self):
        done = run_in_shell("--trace >(head -c1 >/dev/null)", "-m", 100)
        assert done.returncode == 2
        assert "error: /dev/fd/" in done.stderr
        assert "cannot be written (Broken pipe)" in done.stderr
        assert_quiet(done.stderr)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "caf? ??"), ("latin-1", "café ??")])
def test_unencodable_characters_become_question_marks(encoding, shown):
    program = "from gearbx_mlx.cli import terminal; terminal.run(lambda: print('café ─語'))"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = run_python("-c", program, env=environment, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding) == shown + "\n"


class TestSignals:
    @pytest.mark.processes
    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
    def test_signal_ends_output_with_summary_and_trace(self, name, endless, tmp_path):
        number = signal.Signals[name]
        files = ["--trace", tmp_path / "t.jsonl", "--summary", tmp_path / "s.json"]
        # A test run in the background ignores interrupts, and its children would too.
        default = partial(signal.signal, number, signal.SIG_DFL)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*endless, *files], preexec_fn=default, **pipes) as process:
            assert process.stdout.read(20)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert b"tokens/s" in err
        assert_quiet(err.decode())
        summary, trace = json.loads((tmp_path / "s.json").read_text()), read_trace(tmp_path / "t.jsonl")
        assert 0 < summary["tokens"] == len(trace) < 100000
        assert {path.name for path in tmp_path.iterdir()} == {"s.json", "t.jsonl"}

    @pytest.mark.some(4)
    @pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_while_the_prompt_is_read(self, number, flags, command, monkeypatch, tmp_path):
        computed = llama.Model.__call__

        def stop(*arguments, **keywords):
            if not only_shapes.get():
                os.kill(os.getpid(), number)
            return computed(*arguments, **keywords)

        monkeypatch.setattr(llama.Model, "__call__", stop)
        before = signal.signal(number, signal.SIG_DFL)  # a job in the background ignores Ctrl-C
        try:
            done = command("generate", *flags, "--trace", tmp_path / "t.jsonl", "--summary", tmp_path / "s.json")
        finally:
            signal.signal(number, before)
        assert done.status == 128 + number
        assert "0 tokens, 0 tokens/s" in done.err
        summary = json.loads((tmp_path / "s.json").read_text())
        assert (summary["tokens"], summary["weight_bytes_per_token"]) == (0, 0)
        assert read_trace(tmp_path / "t.jsonl") == []

    @pytest.mark.parametrize("name", ["generate", "analyze"])
    def test_a_signal_between_count_and_trace(self, name, command, monkeypatch, tmp_path):
        """The token that is being written is in the trace, as it is in the summary."""
        write = TraceWriter.write

        def stop(writer, entry):
            if entry["index"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            write(writer, entry)

        monkeypatch.setattr(TraceWriter, "write", stop)
        if name == "generate":
            done = command(name, "-m", 20, "--trace", tmp_path / "t.jsonl", "--summary", tmp_path / "s.json")
            trace, summary = tmp_path / "t.jsonl", tmp_path / "s.json"
        else:
            done = command(name, "-m", 20, "--out", tmp_path)
            trace, summary = tmp_path / "trace.jsonl", tmp_path / "summary.json"
        assert done.status == 128 + signal.SIGTERM
        assert json.loads(summary.read_text())["tokens"] == len(read_trace(trace)) == 4

    def test_a_second_signal_does_not_wait(self):
        used = []

        def body():
            for item in in_whole(range(5)):
                os.kill(os.getpid(), signal.SIGTERM)
                used.append(item)
                os.kill(os.getpid(), signal.SIGTERM)
                used.append(item)

        assert run_to_end(body) == 128 + signal.SIGTERM
        assert used == [0]

    def test_signal_in_callback_is_not_lost(self):
        code = """
import os, signal, sys, time, weakref
from gearbx_mlx.cli.signals import run_to_end
class Thing: pass
def body():
    thing = Thing()
    finalizer = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.1)))
    del thing
    time.sleep(20)
sys.exit(run_to_end(body))
"""
        done = run_python("-c", code)
        assert (done.returncode, done.stderr) == (143, "")

    def test_importing_program_keeps_its_signal_handlers(self, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "__init__.py").write_text("import gearbx_mlx")
        code = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
        (tmp_path / "mine" / "__main__.py").write_text(code)
        default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        subprocess.run([sys.executable, "-m", "mine"], preexec_fn=default, env=environment, check=True)

    def test_early_interrupt_has_no_traceback(self):
        """The package's imports are watched, so that the interrupt comes during them."""
        default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        watched = [sys.executable, "-X", "importtime"]
        whole, alone = [*watched, "-m", "gearbx_mlx", "generate"], [*watched, *GENERATE[1:]]
        places = [(line, module) for line in (whole, alone) for module in ("lazy_loader", "msgspec", "mlx.core")]
        for watched, module in places:
            with subprocess.Popen(watched, preexec_fn=default, stderr=subprocess.PIPE, text=True) as process:
                for line in process.stderr:
                    if line.rpartition("|")[2].strip() == module:
                        break
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=60)
            assert process.returncode in (-signal.SIGINT, 130), module
            assert_quiet(err)


class TestCommands:
    def test_without_a_command_they_are_listed(self):
        done = run_python("-m", "gearbx_mlx")
        assert (done.returncode, done.stderr) == (0, "")
        names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
        modules = {file.stem for file in DEMO_MODEL.parent.glob("*.py") if "__main__" in file.read_text()}
        packages = {file.parent.name.replace("_", "-") for file in DEMO_MODEL.parent.glob("*/__main__.py")}
        assert {name.replace("_", "-") for name in names} == modules - {"__main__"} | packages

    def test_unknown_command_is_refused(self):
        done = run_python("-m", "gearbx_mlx", "fly")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: fly: no such command; choose from generate, ")
        assert done.stderr.count("\n") == 1
