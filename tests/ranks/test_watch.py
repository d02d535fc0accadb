"""How a run of several ranks ends, seen from one rank: the test holds the far ends of its connections."""

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from ranks import free_addresses

from gearbx_mlx import GearbxError
from gearbx_mlx.ranks import watch
from gearbx_mlx.ranks.agreement import first_difference
from gearbx_mlx.ranks.place import Place
from gearbx_mlx.ranks.watch import MAX_MESSAGE_CHARS, Channel, RankWatch, connect, listen

# The thread of a rank that ends; it would end the process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ADDRESSES = tuple((("127.0.0.1", 5000 + rank),) for rank in range(3))
ENOUGH = 5.0  # seconds, far more than a message takes


def connected():
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    return Channel(near), Channel(far)


def until(condition):
    """Wait until a condition holds, or long enough."""
    ending = time.monotonic() + ENOUGH
    while not condition() and time.monotonic() < ending:
        time.sleep(0.01)


@pytest.fixture
def rank(monkeypatch):
    """Makes a rank: its watch, the far ends of its channels, its messages, and how it ends."""
    ranks = []

    def made(number, size=3):
        others = range(1, size) if number == 0 else [0]
        pairs = {other: connected() for other in others}
        seen = SimpleNamespace(shown=[], interrupted=[], status=[], killed=[], ended=threading.Event())

        def end(status):
            seen.status.append(status)
            seen.ended.set()
            raise SystemExit

        monkeypatch.setattr(watch.os, "_exit", end)
        monkeypatch.setattr(watch.os, "kill", lambda process, signal: seen.killed.append(process))
        monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.05)
        monkeypatch.setattr(watch, "SAME_ERROR", 0.05)
        place = Place(number, size, "ring", ADDRESSES[:size])

        def start():  # a thread other than the main one leaves this process's signals alone
            near = {other: pair[0] for other, pair in pairs.items()}
            seen.watch = RankWatch(place, near, seen.shown.append, seen.interrupted.append, {2, 15})

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        seen.far = {other: pair[1] for other, pair in pairs.items()}
        for far in seen.far.values():
            far.connection.settimeout(ENOUGH)
        ranks.append(seen)
        return seen

    yield made
    for seen in ranks:  # whose threads would end this process, once the patches are gone
        for far in seen.far.values():
            far.close()
        until(lambda seen=seen: not seen.watch.channels or seen.ended.is_set())


class TestRank0:
    @pytest.mark.parametrize(("status", "shown"), [(2, 2), (0, 1)])
    def test_shows_error_of_other_rank_and_ends_all(self, rank, status, shown):
        first = rank(0)
        first.far[1].send(error="--temp is -1", status=status)
        assert first.ended.wait(ENOUGH)
        assert first.status == [shown]
        assert first.shown == ["rank 1: --temp is -1"]
        assert first.far[2].receive() == {"status": shown, "text": None}
        assert first.killed == [os.getpid()]  # its own work removes files that are half written

    @pytest.mark.parametrize("end", [Channel.close, lambda far: far.connection.sendall(b"[1]\n")])
    def test_names_missing_rank(self, rank, end):
        """A message that is none is as good as gone."""
        first = rank(0)
        end(first.far[2])
        assert first.ended.wait(ENOUGH)
        assert first.status == [1]
        (line,) = first.shown
        assert line.startswith("rank 2 (127.0.0.1:5002) is gone")
        assert first.far[1].receive() == {"status": 1, "text": line}

    def test_signal_of_other_rank_becomes_its_own(self, rank):
        first = rank(0)
        first.far[1].send(signal=15)
        until(lambda: first.interrupted)
        assert first.interrupted == [15]
        assert first.status == []

    def test_its_own_error_is_shown_by_itself(self, rank):
        first = rank(0)
        assert first.watch.fail("no such model", 2) is False
        assert [far.receive() for far in first.far.values()] == [{"status": 2, "text": None}] * 2
        assert first.shown == []

    def test_same_error_of_other_rank_is_shown_once(self, rank):
        first = rank(0)
        first.watch.fail("no such model", 2)
        first.far[1].send(error="no such model", status=2)
        first.far[1].close()
        assert not first.ended.wait(0.3)
        assert first.shown == []

    def test_a_good_end_waits_for_the_others(self, rank):
        first = rank(0)
        for far in first.far.values():
            far.send(bye=0)
        began = time.monotonic()
        watch.ANSWER_SECONDS = ENOUGH  # which it does not need
        first.watch.finish(0)
        assert time.monotonic() - began < ENOUGH / 2
        assert [far.receive() for far in first.far.values()] == [{"status": 0, "text": None}] * 2

    def test_an_error_after_a_good_end_is_shown(self, rank):
        first = rank(0)
        first.watch.finish(0)
        first.far[2].send(error="late", status=1)
        assert first.ended.wait(ENOUGH)
        assert first.shown == ["rank 2: late"]
        assert first.killed == []


class TestOtherRanks:
    @pytest.mark.parametrize("text", [None, "rank 0: no such model"])
    def test_end_on_message_of_rank_0(self, rank, text):
        second = rank(1)
        second.far[0].send(status=2, text=text)
        assert second.ended.wait(ENOUGH)
        assert second.status == [2]
        assert second.shown == ([] if text is None else [text])
        assert second.watch.verdict == watch.Verdict(2, text)

    def test_let_rank_0_show_their_errors(self, rank):
        second = rank(1)
        assert second.watch.fail("out of memory", 1) is True
        assert second.far[0].receive() == {"error": "out of memory", "status": 1}
        assert second.shown == ["rank 1: out of memory"]  # since rank 0 did not end the run meanwhile

    def test_stay_silent_about_error_that_ended_run(self, rank):
        second = rank(1)
        second.far[0].send(status=1, text="rank 2 is gone")
        assert second.ended.wait(ENOUGH)
        assert second.watch.fail(f"{watch.LOST} and more", 1) is True
        assert second.shown == ["rank 2 is gone"]

    def test_know_when_rank_0_is_gone(self, rank):
        second = rank(1)
        second.far[0].close()
        assert second.ended.wait(ENOUGH)
        assert "rank 0 (127.0.0.1:5000) is gone" in second.shown[0]


class TestChannel:
    @pytest.fixture
    def ends(self):
        near, far = connected()
        yield near, far
        near.close()
        far.close()

    def test_joined_messages_are_separated(self, ends):
        near, far = ends
        far.connection.sendall(b'{"a": 1}\n{"b": 2}\n')
        assert near.receive() == {"a": 1}
        assert near.has_message()
        assert near.receive() == {"b": 2}
        assert not near.has_message()

    @pytest.mark.parametrize("data", [b"", b"not JSON\n", b"7\n", b"x" * (MAX_MESSAGE_CHARS + 5000)])
    def test_invalid_message_reads_as_none(self, ends, data):
        near, far = ends
        threading.Thread(target=lambda: (far.connection.sendall(data), far.close())).start()
        assert near.receive() is None

    def test_a_time_limit(self, ends):
        ends[0].connection.settimeout(0.01)
        with pytest.raises(TimeoutError):
            ends[0].receive()

    def test_the_other_end_may_be_gone(self, ends):
        near, far = ends
        far.close()
        for _ in range(3):
            near.send(still=1)
        assert near.receive() is None


class TestMeeting:
    def place(self, rank, size=2):
        addresses = tuple((tuple(each[0].rsplit(":", 1)),) for each in free_addresses(size))
        return Place(rank, size, "ring", tuple(((host, int(port)),) for ((host, port),) in addresses))

    def meet(self, *places):
        """What each rank gets: its channels, or the error."""
        found = {}

        def one(place):
            try:
                found[place.rank] = watch.meet(place)
            except (GearbxError, watch.MeetingRefused) as error:
                found[place.rank] = error

        threads = [threading.Thread(target=one, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ENOUGH)
        for channels in found.values():
            for channel in channels.values() if isinstance(channels, dict) else ():
                channel.close()
        return found

    def test_all_ranks_come(self):
        first = self.place(0)
        found = self.meet(first, Place(1, 2, "ring", first.addresses))
        assert [*found[0]] == [1]
        assert [*found[1]] == [0]

    @pytest.mark.parametrize("comes", [0, 1])
    def test_the_other_does_not_come(self, monkeypatch, comes):
        monkeypatch.setenv("GEARBX_RANKS_WAIT", "0.2")
        said = str(self.meet(self.place(comes))[comes])
        assert f"no {('connection', 'answer')[comes]} within 0.2 seconds" in said
        assert f"rank {1 - comes} (127.0.0.1:" in said

    def test_different_hostfile_is_refused(self):
        first = self.place(0)
        found = self.meet(first, Place(1, 2, "ring", (first.addresses[0], self.place(1).addresses[1])))
        assert str(found[0]) == "rank 1: has a different hostfile, of 2 ranks; use the same one on all ranks"
        assert isinstance(found[1], watch.MeetingRefused)

    def test_duplicate_rank_is_refused(self):
        first = self.place(0, size=3)
        found = self.meet(first, *(Place(1, 3, "ring", first.addresses) for _ in range(2)))
        assert "rank 1: two processes have this number" in str(found[0])

    @pytest.mark.parametrize("text", ["", "x", "-1", "0", "nan", "1e9"])
    def test_the_wait_is_a_number_of_seconds(self, monkeypatch, text):
        monkeypatch.setenv("GEARBX_RANKS_WAIT", text)
        with pytest.raises(GearbxError, match="GEARBX_RANKS_WAIT: not a time"):
            watch.meeting_timeout()

    def test_an_address_in_use(self):
        with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(GearbxError, match="cannot be used"):
            listen(other.getsockname())

    def test_missing_listener_gives_none(self):
        assert connect(self.place(0).addresses[0][0], 1.0) is None


def test_first_difference_names_rank_and_both_values():
    same = {"--seed": "1", "--temp": "0"}
    assert first_difference([same, same]) is None
    found = first_difference([same, same, same | {"--seed": "2"}])
    assert found.startswith("rank 2 differs from rank 0: --seed is 2, and on rank 0 1;")
    assert "more is missing, and on rank 0 here" in first_difference([same | {"more": "here"}, same])
    found = first_difference([{"--prompt": "x" * 100}, {"--prompt": "y"}])
    assert f"--prompt is y, and on rank 0 {'x' * 57}...;" in found
