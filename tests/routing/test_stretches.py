"""Whether rounds or the top gear alone write a text, decided by the clock. The clock is the test's; no model."""

import itertools
import random
import statistics

import pytest

from gearbx_mlx.routing.rounds import FIRST, LONGEST, TRIAL, Stretches


def written(tokens, rounds, alone, texts=1, between=0.0):
    """Seconds of texts whose tokens take `rounds` or `alone` seconds, and how each token was written."""
    now = [0.0]
    stretches, ways = Stretches(lambda: now[0]), []
    for _ in range(texts):
        stretches.begin()
        now[0] += between
        for _ in range(tokens):
            stretches.token()
            if stretches.over:
                stretches.turn()
            ways.append(stretches.in_rounds)
            now[0] += rounds if ways[-1] else alone
    return now[0] - texts * between, ways


@pytest.mark.parametrize(("rounds", "alone"), [(1.3, 1.0), (1.1, 1.0), (1.0, 1.3), (0.5, 1.0)])
def test_costs_hardly_more_than_the_faster_way(rounds, alone):
    seconds, ways = written(4000, rounds, alone)
    assert seconds / 4000 < 1.03 * min(rounds, alone)
    assert 0 < sum(ways) < 4000  # both ways are tried


@pytest.mark.parametrize(("rounds", "gap"), [(1.04, FIRST), (1.1, 240), (1.5, LONGEST)])
def test_the_slower_way_is_tried_the_more_rarely_the_more_it_loses(rounds, gap):
    _, ways = written(4000, rounds, 1.0)
    trials = [place for place in range(1, 4000) if ways[place] and not ways[place - 1]]
    assert {b - a - TRIAL[True] for a, b in itertools.pairwise(trials)} == {gap}


def test_what_becomes_faster_is_found():
    now, seconds = [0.0], {True: 2.0, False: 1.0}
    stretches, ways = Stretches(lambda: now[0]), []
    for token in range(4000):
        if token == 2000:
            seconds[True] = 0.3
        stretches.token()
        if stretches.over:
            stretches.turn()
        ways.append(stretches.in_rounds)
        now[0] += seconds[ways[-1]]
    assert sum(ways[1500:2000]) < 60
    assert sum(ways[3500:]) > 440


def test_short_texts_add_up_and_the_time_between_them_does_not_count():
    """Texts shorter than any stretch; if the pauses between them counted, either way would look slow."""
    seconds, ways = written(10, 1.3, 1.0, texts=400, between=100.0)
    assert seconds / 4000 < 1.06
    assert 2 * TRIAL[True] < sum(ways) < 800


def with_pauses(rounds, alone, every, pause, length=1, tokens=4000):
    """How tokens are written if their reader pauses after each so many. A round makes `length` tokens at once."""
    now, ways, left = [0.0], [], 0
    stretches = Stretches(lambda: now[0])
    for token in range(tokens):
        begins = left == 0 or not stretches.in_rounds
        stretches.token(begins)
        if begins and stretches.over:
            stretches.turn()
        ways.append(stretches.in_rounds)
        if begins:
            left = length if ways[-1] else 1
            now[0] += rounds * length if ways[-1] else alone
        left -= 1
        now[0] += pause if token % every == 0 else 0
    return ways


@pytest.mark.some(6)
@pytest.mark.parametrize("every", [6, 17, 29, 50, 200])
@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize(("rounds", "alone"), [(1.0, 1.5), (1.5, 1.0)])
def test_pauses_of_a_reader_do_not_decide(rounds, alone, length, every):
    """A page that is drawn every few tokens, and takes as long as a hundred tokens."""
    ways = with_pauses(rounds, alone, every, 100.0, length)
    faster = sum(ways[1000:]) / 3000
    assert faster > 0.85 if rounds < alone else faster < 0.2


def texts_of_chance(seconds, seed, tokens=200):
    """Seconds per token of each text. Rounds take so many seconds and make 1 to 5 tokens by chance; alone takes 1."""
    now, drawn, taken = [0.0], random.Random(seed), []
    stretches = Stretches(lambda: now[0])
    for of_round in seconds:
        stretches.begin()
        begun, left = now[0], 0
        for _ in range(tokens):
            stretches.token(left == 0)
            if left == 0:
                if stretches.over:
                    stretches.turn()
                left = drawn.randint(1, 5) if stretches.in_rounds else 1
                now[0] += of_round if stretches.in_rounds else 1.0
            left -= 1
        taken.append((now[0] - begun) / tokens)
    return taken


@pytest.mark.some(2)
@pytest.mark.parametrize("seconds", [[2.4] * 8, [2.7] * 8, [3.0] * 8, [3.3] * 8, [3.9] * 8])
def test_chance_does_not_decide(seconds):
    """A round makes 3 tokens on average; a few in a row that make one or two prove little."""
    found = [time for seed in range(20) for time in texts_of_chance(seconds, seed)]
    assert statistics.mean(found) < min(1, seconds[0] / 3) + 0.04


def test_a_text_that_drafts_badly_does_not_decide_about_the_next_one():
    found = [time for seed in range(20) for time in texts_of_chance([2.2, 3.3] * 4, seed)]
    assert statistics.mean(found) < 0.93
    assert sorted(found)[int(0.95 * len(found))] < 1.12


def test_a_pause_in_the_first_trial_does_not_decide():
    """Otherwise rounds would wait for their next trial, and a short text would be written without them."""
    ways = with_pauses(1.0, 2.0, 10**9, 1000.0, tokens=120)  # after the first token
    assert sum(ways) > 100
