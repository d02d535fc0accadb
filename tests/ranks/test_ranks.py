"""Ranks meet, compare and end: wrong hostfiles, and ranks that differ, never come or die."""

import json
import signal
import socket
import sys

import pytest
from ranks import Ranks, free_addresses, run_ranks
from refusals import refuses

from gearbx_mlx.ranks.place import place_here

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform == "darwin", reason="loopback addresses and words of errors are those of Linux"),
]

GENERATE = ["-m", "gearbx_mlx.generate"]
SOON = 10.0  # seconds within which a run has to end if it cannot continue


def errors(ended):
    """The lines on stderr of each rank."""
    return [rank.stderr.splitlines() for rank in ended]


def hostfile(directory, content):
    file = directory / "hosts.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"MLX_RANK": "0", "MLX_HOSTFILE": str(file)}


class TestPlace:
    @pytest.mark.parametrize("variables", [{}, {"MLX_RANK": "0"}, {"MLX_RANK": "0", "MLX_HOSTFILE": ""}])
    def test_without_hostfile_single_process_runs(self, variables):
        assert place_here(variables) is None

    @pytest.mark.parametrize("content", ["", "[]", [["127.0.0.1:5000"]]])
    def test_single_rank_runs_without_peers(self, tmp_path, content):
        assert place_here(hostfile(tmp_path, content)) is None

    def test_unreadable_devices_are_named(self, tmp_path):
        variables = {"MLX_RANK": "0", "MLX_IBV_DEVICES": str(tmp_path / "none")}
        with refuses("none: cannot be read (No such file", "set MLX_IBV_DEVICES to a readable file"):
            place_here(variables)

    def test_hostfile_gives_rank_addresses(self, tmp_path):
        place = place_here(hostfile(tmp_path, [["a:1", "a:2"], ["[::1]:3"]]))
        assert (place.rank, place.size, place.backend) == (0, 2, "ring")
        assert place.addresses == ((("a", 1), ("a", 2)), (("[::1]", 3),))

    def test_mpi_gives_rank_count(self):
        place = place_here({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"})
        assert (place.rank, place.size, place.backend, place.addresses) == (2, 4, "mpi", ())

    @pytest.mark.parametrize(
        ("content", "variables", "said"),
        [
            ("[[", {}, "hosts.json … not JSON"),
            ('{"hosts": []}', {}, "hosts.json … no list"),
            ([["a:1"], "b:2"], {}, "hosts.json … not an address, got null"),
            ([["a:1"], []], {}, "hosts.json … rank 1 has no address"),
            ([["a:1"], ["b"]], {}, 'hosts.json … not an address, got "b"'),
            ([["a:1"], ["b:0"]], {}, 'hosts.json … not an address, got "b:0"'),
            ([["a:1"], ["b:65536"]], {}, 'hosts.json … not an address, got "b:65536"'),
            ([["a:1"], ["b:-1"]], {}, 'hosts.json … not an address, got "b:-1"'),
            ([["a:1"], [7]], {}, "hosts.json … not an address, got 7"),
            ([["a:1"], ["a:1"]], {}, "hosts.json … duplicate address, got a:1"),
            *(([["a:1"], ["b:2"]], {"MLX_RANK": rank}, "MLX_RANK") for rank in ("", "x", "-1", "²")),
            ([["a:1"], ["b:2"]], {"MLX_RANK": "2"}, "names 2 ranks, and this process is rank 2"),
            ([], {"MLX_HOSTFILE": "none.json"}, "none.json: cannot be read (No such file"),
        ],
    )
    def test_invalid_hostfile_entry_is_refused(self, tmp_path, content, variables, said):
        with refuses(*said.split(" … ")):
            place_here(hostfile(tmp_path, content) | variables)


@pytest.mark.parametrize("command", ["chat", "server", "evaluate", "convert", "benchmark"])
def test_commands_of_one_process_refuse_on_rank_0(command):
    ended = run_ranks(2, ["-m", f"gearbx_mlx.{command}"])
    assert [each.status for each in ended] == [2, 2]
    assert errors(ended) == [
        [f"error: gearbx_mlx.{command}: runs as one process, got 2 ranks; use gearbx_mlx.generate"],
        [],
    ]


class TestDifferences:
    def test_rank_error_is_shown_once_with_number(self):
        ended = run_ranks(2, GENERATE, each={1: ["--temp", "-1"]})
        assert [each.status for each in ended] == [2, 2]
        assert errors(ended) == [["error: rank 1: --temp: out of range, got -1.0; use 0 to 1000"], []]

    def test_different_seed_is_refused_before_loading(self):
        ended = run_ranks(2, [*GENERATE, "--model", "/nowhere"], each={0: ["--seed", "1"], 1: ["--seed", "2"]})
        assert [each.status for each in ended] == [2, 2]
        (line,), silent = errors(ended)
        assert line.startswith("error: rank 1 differs from rank 0: --seed is 2, and on rank 0 1;")
        assert silent == []


# A command whose ranks wait for each other inside MLX, as in a pass over a model.
WAITING = """
import os
import sys
import mlx.core as mx
from gearbx_mlx.cli import signals, terminal
from gearbx_mlx.cli.start import together

def passes():
    print("begun", file=sys.stderr, flush=True)
    open(os.environ["MLX_HOSTFILE"] + os.environ["MLX_RANK"], "w").close()  # the other ranks are silent
    while True:
        mx.eval(mx.distributed.all_sum(mx.ones(4)))

sys.argv = ["gearbx_mlx.generate"]
terminal.run(lambda: together("generate", lambda: signals.run_to_end(passes)))
"""
# The same, but rank 1 does something else meanwhile, so that rank 0 waits inside MLX for ever.
STUCK = WAITING.replace(
    "    while True", "    while os.environ['MLX_RANK'] == '1': time.sleep(1)\n    while True"
).replace("import os", "import os, time")

# Rank 1 fails while rank 0 is in a finalizer, where Python drops exceptions.
FINALIZED = WAITING.replace(
    "    while True",
    """
    class Slow:
        def __del__(self):
            time.sleep(0.5)
    if os.environ["MLX_RANK"] == "0":
        for _ in range(10):
            Slow()
        time.sleep(60)
    time.sleep(0.7)
    raise GearbxError("no")
    while True""",
).replace("import os", "import os, time\nfrom gearbx_mlx.errors import GearbxError", 1)


class TestEnds:
    @pytest.mark.parametrize("dies", [0, 2])
    def test_killed_rank_ends_all_with_messages(self, dies):
        with Ranks(3, ["-c", WAITING]) as ranks:
            ranks.until_all_begin()
            ranks.processes[dies].kill()
            killed = ranks.elapsed()
            ended = ranks.wait()
        others = [each for rank, each in enumerate(ended) if rank != dies]
        assert [each.status for each in others] == [1, 1]
        assert max(each.seconds for each in others) - killed < SOON
        for each in others:
            line = each.stderr.splitlines()[-1]
            assert line.startswith(f"error: rank {dies} (127.0.0.1:")
            assert line.endswith("is gone, and the run has ended; start all ranks again")
            assert each.stderr.count("\n") <= 2  # with "begun"

    def test_error_during_finalizer_ends_run_cleanly(self):
        with Ranks(2, ["-c", FINALIZED]) as ranks:
            ranks.until_all_begin()
            ended = ranks.wait()
        assert [each.status for each in ended] == [2, 2]
        assert errors(ended) == [["begun", "error: rank 1: no"], []]
        assert ended[0].seconds < ended[1].seconds + 2  # not after ANSWER_SECONDS

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.parametrize("gets", [[0], [1], [0, 1]])
    def test_signal_to_any_rank_ends_all_silently(self, number, status, gets):
        with Ranks(2, ["-c", WAITING]) as ranks:
            ranks.until(0, "begun")
            for rank in gets:
                ranks.processes[rank].send_signal(number)
            ended = ranks.wait()
        assert [each.status for each in ended] == [status, status]
        assert "error" not in "".join(each.stderr for each in ended)

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.parametrize("gets", [0, 1])
    def test_signal_while_rank_0_blocks_ends_all(self, number, status, gets):
        with Ranks(2, ["-c", STUCK]) as ranks:
            ranks.until(0, "begun")
            ranks.processes[gets].send_signal(number)
            sent = ranks.elapsed()
            ended = ranks.wait(sent + 3 * SOON)
        assert [each.status for each in ended] == [status, status]
        assert "error" not in "".join(each.stderr for each in ended)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use(rank):
    hosts = free_addresses(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(hosts[rank][0].rpartition(":")[2])))
        other.listen()
        ended = run_ranks(2, GENERATE, hosts=hosts, environment={"GEARBX_RANKS_WAIT": "2"})
    assert [each.status for each in ended] == [2, 2]
    assert max(each.seconds for each in ended) < SOON
    (line,) = errors(ended)[0]
    assert f"{hosts[rank][0]}: cannot be used (Address already in use)" in line
    assert ("rank 1: " in line) == (rank == 1)
