"""How long the policy of mode lossless drafts. Only numbers and simulated clocks; no model runs here, and no time."""

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import GearbxError
from gearbx_mlx.decoding.policy import (
    BURST,
    MOST_DRAFTED,
    STEP,
    Acceptance,
    FixedPolicy,
    LearnedPolicy,
    Line,
    draft_share,
    pool_adjacent_violators,
)

values = st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 50)), min_size=1, max_size=30)


@dataclass
class Machine:
    """Seconds of a token alone, of a drafted one, and of a round of one row and of each row more."""

    alone: float = 0.015
    drafted: float = 0.005
    one: float = 0.0155
    row: float = 0.0015

    def round(self, drafted: int) -> float:
        return drafted * self.drafted + self.one + drafted * self.row


def write(policy, machine, tokens, share=0.85, early=False, slow=lambda token: 1.0, seed=0):
    """Write tokens, the drafted ones of which are right with a probability; returns seconds and lengths (0: alone)."""
    rng, seconds, lengths, written = random.Random(seed), 0.0, [], 0
    while written < tokens:
        length = policy.length(tokens - written, early)
        if not length:
            spent = machine.alone * slow(written)
            policy.add_plain(spent)
            written += 1
        else:
            # Half of the tokens are sure, and the others fail.
            margins = [rng.choice((0.2, 5.0)) if early else 1.0 for _ in range(length)]
            right = [
                margin > 1 or rng.random() < 2 * share - 1 if early else rng.random() < share for margin in margins
            ]
            if early:
                length = next((k for k in range(1, length) if not policy.goes_on(margins[:k])), length)
            accepted = sum(itertools.takewhile(bool, right[:length]))
            spent = machine.round(length) * slow(written)
            known = margins[:length] if early else ()
            drafting = length * machine.drafted * slow(written) if early else None
            policy.add_round(
                drafted=length,
                accepted=accepted,
                rows=length + 1,
                seconds=spent,
                draft_seconds=drafting,
                margins=known,
            )
            written += accepted + 1
        seconds += spent
        lengths.append(length)
    return seconds, lengths


def best_length(machine, share):
    """By the formula of the module: the length whose tokens take least, and what they take; 0: alone."""
    costs = {0: machine.alone}
    for length in range(1, MOST_DRAFTED + 1):
        costs[length] = machine.round(length) / sum(share**place for place in range(length + 1))
    best = min(costs, key=costs.get)
    return best, costs[best]


class TestFixed:
    @pytest.mark.parametrize("length", [0, -1, 16])
    def test_a_draft_must_fit_a_check(self, length):
        with pytest.raises(GearbxError, match="1 to 15"):
            FixedPolicy(length)

    def test_drafts_are_as_long_as_there_is_room(self):
        assert [FixedPolicy(4).length(room) for room in (0, 1, 3, 4, 100)] == [0, 1, 3, 4, 4]
        assert [FixedPolicy(3).goes_on([1.0] * drafted) for drafted in (1, 2, 3)] == [True, True, False]

    def test_a_proposal_is_taken_as_far_as_pays_at_usual_costs(self):
        assert FixedPolicy().looked_up([0.9, 0.8, 0.7], 9) == 3
        assert FixedPolicy().looked_up([0.9, 0.02], 9) == 1
        assert FixedPolicy().looked_up([0.9, 0.7], 1) == 1
        assert FixedPolicy().looked_up([0.05], 9) == FixedPolicy().looked_up([0.9], -1) == 0


class TestIsotonicRegression:
    @given(values)
    def test_isotonic_regression_falls_and_keeps_the_weighted_mean(self, pairs):
        y, w = zip(*pairs)
        smooth = pool_adjacent_violators(y, w)
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(smooth))
        assert np.dot(smooth, w) == pytest.approx(np.dot(y, w))

    @settings(deadline=None)
    @given(st.lists(st.floats(0, 1), min_size=2, max_size=7), st.lists(st.floats(0, 1), min_size=7, max_size=7))
    def test_no_falling_sequence_is_closer(self, y, other):
        smooth = pool_adjacent_violators(y, [1.0] * len(y))
        falling = sorted(other[: len(y)], reverse=True)
        assert sum((a - b) ** 2 for a, b in zip(smooth, y)) <= sum((a - b) ** 2 for a, b in zip(falling, y)) + 1e-9


class TestLine:
    def test_begins_with_the_usual_one(self):
        assert [Line(0.5, tile=4)(proposed) for proposed in (0, 1, 3, 4)] == [1.0, 1.5, 2.5, 3.0 + STEP]

    @pytest.mark.parametrize("height", [0.9, 1.1])
    def test_comes_to_what_a_row_takes(self, height):
        """What counts is how much more a round takes than another; the unit is that of usual rounds."""
        line, rng = Line(0.05), random.Random(0)
        for _ in range(400):
            proposed = rng.randrange(12)
            line.add(proposed, height * (1 + 0.12 * proposed) * rng.uniform(0.9, 1.1))
        assert line.row == pytest.approx(0.12, rel=0.15)

    def test_rounds_of_one_length_say_nothing(self):
        line = Line(0.05)
        for _ in range(2000):
            line.add(3, 1.15)
        assert line.row == pytest.approx(0.05, abs=0.001)

    @given(st.lists(st.tuples(st.integers(0, 15), st.floats(1e-5, 10)), max_size=60))
    def test_is_positive_and_never_falls(self, times):
        line = Line(0.08, tile=4)
        for proposed, ratio in times:
            line.add(proposed, ratio)
        values = [line(proposed) for proposed in range(16)]
        assert values[0] == 1.0
        assert values == sorted(values)

    def test_one_pause_hardly_counts(self):
        line = Line(0.08)
        for ratio in [*[1.16] * 8, 90.0, *[1.16] * 8]:
            line.add(2, ratio)
        assert line.row < 0.09


class TestAcceptance:
    def test_begins_as_if_errors_were_normal(self):
        agreement = Acceptance({})
        assert [agreement.of_margin(m) for m in (0.9, 1.75, 2.25)] == pytest.approx([0.87, 0.986, 0.998], abs=0.001)

    def test_comes_to_what_the_drafts_show(self):
        rng, agreement = np.random.default_rng(0), Acceptance({})
        for margin in rng.exponential(2.0, 4000):
            agreement.add(1, int(rng.random() < min(0.4 + 0.2 * margin, 0.9)), [margin])
        found = [agreement.of_margin(m) for m in (0.1, 0.7, 1.4, 3.5)]
        assert found == pytest.approx([0.42, 0.54, 0.68, 0.9], abs=0.08)

    @given(st.lists(st.tuples(st.lists(st.floats(0, math.inf), max_size=5), st.integers(0, 5)), max_size=30))
    def test_rises_with_the_margin_and_stays_a_probability(self, drafts):
        agreement = Acceptance({})
        for margins, accepted in drafts:
            agreement.add(len(margins), min(accepted, len(margins)), margins)
        found = [agreement.of_margin(m) for m in np.linspace(0, 20, 100)]
        assert found == sorted(found)
        assert 0 < found[0] <= found[-1] <= 1

    def test_what_follows_a_rejected_token_says_nothing(self):
        one, other = Acceptance({}), Acceptance({})
        one.add(4, 1, [1.1, 0.5, 3.0, 3.0])
        other.add(2, 1, [1.1, 0.5])
        assert one.state == other.state
        assert one.of_margin(1.1) > Acceptance({}).of_margin(1.1)
        assert one.of_margin(0.5) < Acceptance({}).of_margin(0.5)
        assert one.of_place(1) < Acceptance({}).of_place(1)

    def test_places_are_learned_without_margins(self):
        agreement = Acceptance({})
        for _ in range(500):
            agreement.add(3, 1, [])
        assert agreement.of_place(0) > 0.9
        assert agreement.of_place(1) < 0.1


class TestLength:
    @pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
    @pytest.mark.parametrize("drafted", [0.003, 0.005, 0.012])
    def test_nears_the_best_length_of_the_formula(self, share, drafted):
        machine = Machine(drafted=drafted)
        policy = LearnedPolicy(draft_share=0.36)
        write(policy, machine, 600, share)
        seconds, _ = write(policy, machine, 3000, share, seed=1)
        assert seconds / 3000 < 1.06 * best_length(machine, share)[1]

    def test_a_token_more_and_a_token_less_are_measured_alike(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 2000)
        _, lengths = write(policy, Machine(), 6000, seed=1)
        counts = Counter(length for length in lengths if length)
        best = max(counts, key=counts.get)
        assert 0.5 < counts[best + 1] / counts[best - 1] < 2
        assert counts[best] > 0.8 * counts.total()

    def test_drafts_from_the_first_token_on(self):
        for early in (True, False):
            assert LearnedPolicy().length(100, early) >= 1

    def test_never_drafts_more_than_there_is_room_for(self):
        policy = LearnedPolicy()
        assert [policy.length(room, early=True) for room in (-1, 0, 1, 3)] == [0, 0, 1, 3]
        assert policy.length(1000, early=True) <= MOST_DRAFTED

    def test_where_drafts_lose_the_top_gear_writes_and_trials_are_rare(self):
        machine = Machine(drafted=0.03)
        policy = LearnedPolicy()
        write(policy, machine, 1000)  # three comparisons
        seconds, lengths = write(policy, machine, 4000, seed=1)
        assert 0 < sum(length > 0 for length in lengths) < 0.02 * len(lengths)
        assert seconds < 1.015 * 4000 * machine.alone

    def test_where_drafts_pay_tokens_alone_are_rare(self):
        machine = Machine()
        policy = LearnedPolicy()
        write(policy, machine, 400)
        _, lengths = write(policy, machine, 4000, seed=1)
        alone = lengths.count(0)
        assert BURST <= alone < 0.03 * 4000

    def test_a_machine_whose_drafts_become_cheap_is_found(self):
        policy = LearnedPolicy()
        write(policy, Machine(drafted=0.03), 1000)
        _, lengths = write(policy, Machine(), 3000, seed=1)
        late = lengths[-300:]
        assert late.count(0) < 0.1 * len(late)

    def test_one_noisy_minute_settles_nothing(self):
        """Rounds take four times as long for a while; some hundred tokens later they write again."""
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 400)
        for _ in range(60):
            length = policy.length(100)
            if length:
                policy.add_round(drafted=length, accepted=0, rows=length + 1, seconds=4 * machine.round(length))
            else:
                policy.add_plain(machine.alone)
        _, lengths = write(policy, machine, 2000, seed=1)
        late = lengths[-200:]
        assert late.count(0) < 0.1 * len(late)

    def test_what_makes_all_passes_slower_changes_nothing(self):
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 400)
        seconds, _ = write(policy, machine, 1200, slow=lambda token: 3.0 if 200 < token < 700 else 1.0, seed=1)
        again = LearnedPolicy()
        write(again, machine, 400)
        usual, _ = write(again, machine, 1200, seed=1)
        assert seconds < 1.1 * usual * (700 + 500 * 3) / 1200


class TestMargins:
    def test_a_draft_goes_on_after_sure_tokens_and_ends_after_doubtful_ones(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 1000, early=True)
        assert policy.goes_on([5.0])
        assert not policy.goes_on([5.0, 0.2, 0.2])

    def test_is_never_longer_than_a_verification_takes(self):
        assert not LearnedPolicy().goes_on([9.0] * MOST_DRAFTED)

    def test_margins_gain_over_any_length(self):
        machine, share, count = Machine(), 0.75, 4000
        policy = LearnedPolicy()
        write(policy, machine, 600, share, early=True)
        seconds, _ = write(policy, machine, count, share, early=True, seed=1)
        assert seconds / count < best_length(machine, share)[1]


class TestLookup:
    def test_takes_what_saves_most(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 1000)
        assert policy.looked_up([0.99**place for place in range(1, 16)], 15) >= 10
        assert policy.looked_up([0.2, 0.04], 15) == 0
        assert policy.looked_up([0.99] * 15, 4) == 4
        assert policy.looked_up([], 15) == policy.looked_up([0.99], 0) == 0

    def test_rows_that_turn_out_dear_are_not_taken_again(self):
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 1000)
        proposal = [0.8**place for place in range(1, 16)]
        taken = policy.looked_up(proposal, 15)
        for _ in range(30):
            policy.add_round(drafted=0, accepted=1, rows=taken + 1, seconds=10 * machine.alone)
        assert policy.looked_up(proposal, 15) < taken

    def test_without_a_drafter_rows_are_compared_with_tokens_alone(self):
        policy = LearnedPolicy(draft_share=None)
        proposal = [0.8**place for place in range(1, 16)]
        taken = policy.looked_up(proposal, 15)
        for _ in range(30):
            for _ in range(8):
                policy.add_plain(0.015)
            policy.add_round(drafted=0, accepted=1, rows=taken + 1, seconds=0.15)
        assert policy.looked_up(proposal, 15) < taken

    def test_the_text_alone_may_propose(self):
        policy = LearnedPolicy(draft_share=None)
        for _ in range(20):
            assert policy.length(100) == 0
            policy.add_plain(0.015)
        assert policy.looked_up([0.9, 0.8, 0.7], 3) == 3
        assert policy.looked_up([0.01], 3) == 0


class TestKept:
    def test_the_state_is_positive_and_says_no_choice(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 1000, early=True)
        assert min(policy.state.values()) > 0
        assert {name.split()[0] for name in policy.state} == {
            "seconds",
            "share",
            "count",
            "written",
            "comparison",
        }

    def test_without_a_drafter_all_of_it_is_positive_too(self):
        policy = LearnedPolicy(draft_share=None)
        policy.add_round(drafted=0, accepted=2, rows=3, seconds=0.02)
        policy.add_round(drafted=0, accepted=2, rows=3, seconds=0.02)
        assert "seconds of a drafted token" in policy.state
        assert min(policy.state.values()) > 0

    @pytest.mark.parametrize("early", [True, False])
    def test_another_start_begins_with_it(self, early):
        machine = Machine(drafted=0.03)
        first = LearnedPolicy()
        write(first, machine, 1000, early=early)
        again = LearnedPolicy(first.state)
        _, lengths = write(again, machine, 90, early=early)
        assert lengths[:32].count(0) == 32
        assert 0 < lengths[32:].count(0) < 58  # and then a trial

    def test_a_state_with_strange_numbers_is_taken(self):
        policy = LearnedPolicy({"comparison 0": 1e-9, "seconds of a pass": 1e9, "share below 0.3": 7.0, "other": 1.0})
        _, lengths = write(policy, Machine(), 3000)
        assert lengths[-100:].count(0) < 20


class TestFigures:
    def test_nothing_is_said_after_a_few_tokens(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 6)
        assert policy.alone_seconds is None
        assert policy.round_seconds is None

    @pytest.mark.parametrize("early", [True, False])
    def test_says_what_was_measured_in_this_run(self, early):
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 1200, early=early)
        assert policy.alone_seconds == pytest.approx(machine.alone, rel=0.03)
        assert policy.round_seconds < machine.alone

    def test_says_nothing_of_an_earlier_start(self):
        first = LearnedPolicy()
        write(first, Machine(), 600)
        again = LearnedPolicy(first.state)
        write(again, Machine(), 40)
        assert again.alone_seconds is None


@pytest.mark.parametrize(("draft", "top", "share"), [(4, 16, 0.3625), (4, 8, 0.575), (8, 8, 1.0)])
def test_the_share_of_a_draft_follows_its_bits(draft, top, share):
    assert draft_share(draft, top) == pytest.approx(share)


class TestGain:
    def test_is_what_better_drafts_bring_on_this_machine(self):
        """Estimated from rounds with bad drafts, it is near to what drafts write that are right more often."""
        machine, policy = Machine(), LearnedPolicy()
        slow, _ = write(policy, machine, 4000, share=0.6)
        fast, _ = write(LearnedPolicy(), machine, 4000, share=0.6 + 0.4 * 0.5)
        assert policy.gain(0.5) == pytest.approx(slow / fast, rel=0.15)
        assert 1 <= policy.gain(0.1) < policy.gain(0.5)

    def test_is_not_claimed_without_figures(self):
        assert LearnedPolicy().gain(0.5) is None
        assert FixedPolicy(3).gain(0.5) is None
