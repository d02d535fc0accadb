"""How long the policy of mode lossless drafts. Only numbers and simulated clocks; no model runs here, and no time."""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import GearbxError
from gearbx_mlx.decoding.policy import MAX_DRAFTED, FixedPolicy, LearnedPolicy

rounds = st.tuples(st.integers(1, 15), st.integers(0, 15), st.floats(1e-6, 1e3), st.floats(0, math.inf))


@dataclass
class Machine:
    """Seconds of a plain token, of a drafted one, and of a round of one row and of each row more."""

    plain: float = 0.015
    drafted: float = 0.005
    one: float = 0.0155
    row: float = 0.0015

    def round(self, drafted: int) -> float:
        return drafted * self.drafted + self.one + drafted * self.row


def write(policy, machine, tokens, share=0.85, early=False, slow=lambda token: 1.0, seed=0):
    """Write tokens, the drafted ones of which are right with a probability; returns seconds and lengths (0: plain)."""
    rng, seconds, lengths, written = random.Random(seed), 0.0, [], 0
    while written < tokens:
        length = policy.length(tokens - written, early)
        if not length:
            spent = machine.plain * slow(written)
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
            policy.add_round(
                drafted=length,
                accepted=accepted,
                tokens=accepted + 1,
                rows=length + 1,
                seconds=spent,
                margins=known,
            )
            written += accepted + 1
        seconds += spent
        lengths.append(length)
    return seconds, lengths


def best_length(machine, share):
    """By the formula of the module: the length whose tokens take least, and what they take; 0: plain decoding."""
    costs = {0: machine.plain}
    for length in range(1, MAX_DRAFTED + 1):
        costs[length] = machine.round(length) / sum(share**place for place in range(length + 1))
    best = min(costs, key=costs.get)
    return best, costs[best]


class TestFixed:
    @pytest.mark.parametrize("length", [0, -1, 16])
    def test_draft_fits_verification(self, length):
        with pytest.raises(GearbxError, match="1 to 15"):
            FixedPolicy(length)

    def test_drafts_are_as_long_as_there_is_room(self):
        assert [FixedPolicy(4).length(room) for room in (0, 1, 3, 4, 100)] == [0, 1, 3, 4, 4]
        assert [FixedPolicy(3).goes_on([1.0] * drafted) for drafted in (1, 2, 3)] == [True, True, False]

    def test_proposal_is_cut_to_fastest_length(self):
        assert FixedPolicy().lookup_length([0.9, 0.8, 0.7]) == 3
        assert FixedPolicy().lookup_length([0.9, 0.02]) == 1
        assert FixedPolicy().lookup_length([0.05]) == FixedPolicy().lookup_length([]) == 0


class TestLearning:
    def test_learns_cost_of_drafted_token(self):
        machine, policy, rng = Machine(), LearnedPolicy(draft_share=0.1), random.Random(0)
        for _ in range(800):
            length = rng.randrange(1, 9)
            seconds = machine.round(length) * rng.uniform(0.9, 1.1)
            policy.add_round(drafted=length, accepted=length, tokens=length + 1, rows=length + 1, seconds=seconds)
        assert policy.cost(8) / policy.cost(1) == pytest.approx(machine.round(8) / machine.round(1), rel=0.1)

    def test_single_length_rounds_inform_no_others(self):
        policy = LearnedPolicy()
        before = policy.cost(8)
        for _ in range(2000):
            policy.add_round(drafted=3, accepted=2, tokens=3, rows=4, seconds=1.15)
        assert policy.cost(8) == before

    def test_extra_weight_pass_costs_more_than_row(self):
        costs = [LearnedPolicy(tile=4).cost(drafted) for drafted in range(6)]
        steps = [after - before for before, after in itertools.pairwise(costs)]
        assert steps[3] > steps[2] == pytest.approx(steps[4])

    def test_one_pause_hardly_counts(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 1000)
        before = policy.cost(5)
        for length, seconds in ((2, 0.03), (6, 90.0), (2, 0.03)):
            policy.add_round(drafted=length, accepted=0, tokens=1, rows=length + 1, seconds=seconds)
        assert policy.cost(5) == pytest.approx(before, rel=0.1)

    def test_tokens_after_rejection_are_ignored(self):
        one, other = LearnedPolicy(), LearnedPolicy()
        one.add_round(drafted=4, accepted=1, tokens=2, rows=5, seconds=1.0, margins=[1.1, 0.5, 3.0, 3.0])
        other.add_round(drafted=2, accepted=1, tokens=2, rows=3, seconds=1.0, margins=[1.1, 0.5])
        assert one.acceptance == other.acceptance
        assert one.state["error"] == other.state["error"]

    def test_accepted_end_of_sequence_is_no_rejection(self):
        ended, longer = LearnedPolicy(), LearnedPolicy()
        ended.add_round(drafted=4, accepted=2, tokens=2, rows=5, seconds=1.0, margins=[1.1, 0.5, 3.0, 3.0])
        longer.add_round(drafted=2, accepted=2, tokens=3, rows=3, seconds=1.0, margins=[1.1, 0.5])
        assert ended.acceptance == longer.acceptance > LearnedPolicy().acceptance
        assert ended.state["error"] == longer.state["error"]

    @settings(deadline=None)
    @given(st.lists(st.one_of(rounds, st.floats(1e-6, 1e3)), max_size=60))
    def test_choices_and_state_stay_in_range(self, passes):
        policy = LearnedPolicy(tile=4)
        for each in passes:
            if isinstance(each, float):
                policy.add_plain(each)
            else:
                drafted, accepted, seconds, margin = each
                found = {
                    "accepted": min(accepted, drafted),
                    "tokens": min(accepted, drafted) + 1,
                    "rows": drafted + 1,
                    "margins": [margin] * drafted,
                }
                policy.add_round(drafted=drafted, seconds=seconds, **found)
            assert 0 <= policy.length(20) <= MAX_DRAFTED
        assert policy.goes_on([0.1]) in (True, False)
        assert not policy.goes_on([9.0] * MAX_DRAFTED)
        assert all(0 < value < math.inf for value in policy.state.values())
        costs = [policy.cost(drafted) for drafted in range(16)]
        assert costs == sorted(costs)


class TestLength:
    @pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
    @pytest.mark.parametrize("drafted", [0.003, 0.005, 0.012])
    def test_nears_the_best_length_of_the_formula(self, share, drafted):
        machine = Machine(drafted=drafted)
        policy = LearnedPolicy(draft_share=0.36)
        write(policy, machine, 600, share)
        seconds, _ = write(policy, machine, 3000, share, seed=1)
        assert seconds / 3000 < 1.06 * best_length(machine, share)[1]

    @pytest.mark.parametrize("drafted", [0.003, 0.012, 0.03])
    def test_length_asked_twice_is_same(self, drafted):
        twice = LearnedPolicy()
        ask = twice.length
        twice.length = lambda *given: (ask(*given), ask(*given))[1]
        found = [write(policy, Machine(drafted=drafted), 4000) for policy in (twice, LearnedPolicy())]
        assert found[0] == found[1]

    def test_drafts_from_the_first_token_on(self):
        for early in (True, False):
            assert LearnedPolicy().length(100, early) >= 1

    def test_never_drafts_more_than_there_is_room_for(self):
        policy = LearnedPolicy()
        assert [policy.length(room, early=True) for room in (-1, 0, 1, 3)] == [0, 0, 1, 3]
        assert policy.length(1000, early=True) <= MAX_DRAFTED

    def test_slower_drafting_makes_trials_rare(self):
        machine = Machine(drafted=0.03)
        policy = LearnedPolicy()
        seconds, lengths = write(policy, machine, 4000)
        first, second = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
        assert 0 < sum(length > 0 for length in second) < 0.04 * len(second)
        assert sum(length > 0 for length in first) < 0.1 * len(first)
        assert seconds < 1.1 * 4000 * machine.plain

    def test_rejected_drafts_end_soon(self):
        _, lengths = write(LearnedPolicy(), Machine(), 200, share=0.2)
        assert lengths[:100].count(0) > 50

    def test_faster_drafting_makes_plain_tokens_rare(self):
        machine = Machine()
        policy = LearnedPolicy()
        write(policy, machine, 400)
        _, lengths = write(policy, machine, 4000, seed=1)
        assert 0 < lengths.count(0) < 0.03 * 4000

    def test_a_machine_whose_drafts_become_cheap_is_found(self):
        policy = LearnedPolicy()
        write(policy, Machine(drafted=0.03), 1000)
        _, lengths = write(policy, Machine(), 3000, seed=1)
        late = lengths[-300:]
        assert late.count(0) < 0.1 * len(late)

    def test_noisy_minute_is_forgotten(self):
        """Rounds take four times as long for a while; some hundred tokens later they write again."""
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 400)
        for _ in range(60):
            length = policy.length(100)
            if length:
                policy.add_round(
                    drafted=length, accepted=0, tokens=1, rows=length + 1, seconds=4 * machine.round(length)
                )
            else:
                policy.add_plain(machine.plain)
        _, lengths = write(policy, machine, 2000, seed=1)
        late = lengths[-200:]
        assert late.count(0) < 0.1 * len(late)

    def test_uniform_slowdown_changes_no_choice(self):
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 400)
        seconds, _ = write(policy, machine, 1200, slow=lambda token: 3.0 if 200 < token < 700 else 1.0, seed=1)
        again = LearnedPolicy()
        write(again, machine, 400)
        usual, _ = write(again, machine, 1200, seed=1)
        assert seconds < 1.1 * usual * (700 + 500 * 3) / 1200


class TestMargins:
    def test_draft_continues_while_tokens_are_certain(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 1000, early=True)
        assert policy.goes_on([5.0])
        assert not policy.goes_on([5.0, 0.2, 0.2])

    def test_is_never_longer_than_a_verification_takes(self):
        assert not LearnedPolicy().goes_on([9.0] * MAX_DRAFTED)

    def test_margins_are_faster_than_fixed_lengths(self):
        machine, share, count = Machine(), 0.75, 4000
        policy = LearnedPolicy()
        write(policy, machine, 600, share, early=True)
        seconds, _ = write(policy, machine, count, share, early=True, seed=1)
        assert seconds / count < best_length(machine, share)[1]


class TestLookup:
    def test_takes_fastest_proposal(self):
        policy = LearnedPolicy()
        write(policy, Machine(), 1000)
        assert policy.lookup_length([0.99**place for place in range(1, 16)]) >= 10
        assert policy.lookup_length([0.2, 0.04]) == 0
        assert policy.lookup_length([0.99] * 4) == 4
        assert policy.lookup_length([]) == 0

    def test_expensive_rows_are_not_taken_again(self):
        machine, policy = Machine(), LearnedPolicy()
        write(policy, machine, 1000)
        proposal = [0.8**place for place in range(1, 16)]
        taken = policy.lookup_length(proposal)
        for _ in range(30):
            policy.add_round(drafted=0, accepted=1, tokens=2, rows=taken + 1, seconds=10 * machine.plain)
        assert policy.lookup_length(proposal) < taken

    def test_without_drafter_rows_compete_with_plain_tokens(self):
        policy = LearnedPolicy(draft_share=None)
        proposal = [0.8**place for place in range(1, 16)]
        taken = policy.lookup_length(proposal)
        for _ in range(30):
            for _ in range(8):
                policy.add_plain(0.015)
            policy.add_round(drafted=0, accepted=1, tokens=2, rows=taken + 1, seconds=0.15)
        assert policy.lookup_length(proposal) < taken

    def test_rows_that_cost_a_pass_are_not_proposed(self):
        policy = LearnedPolicy(draft_share=None)
        assert policy.lookup_length([0.6]) == 1
        for _ in range(10):
            for _ in range(3):
                policy.add_plain(0.01)
            policy.add_round(drafted=0, accepted=1, tokens=2, rows=2, seconds=0.019)
        assert policy.lookup_length([0.6]) == 0
        assert LearnedPolicy(policy.state, draft_share=None).lookup_length([0.6]) == 0

    def test_lookup_may_draft_without_other_drafters(self):
        policy = LearnedPolicy(draft_share=None)
        for _ in range(20):
            assert policy.length(100) == 0
            policy.add_plain(0.015)
        assert policy.lookup_length([0.9, 0.8, 0.7]) == 3
        assert policy.lookup_length([0.01]) == 0


class TestKeptState:
    @pytest.mark.parametrize("share", [0.36, None])
    def test_state_is_positive_and_stores_no_choice(self, share):
        policy = LearnedPolicy(draft_share=share)
        write(policy, Machine(), 1000, early=True)
        assert min(policy.state.values()) > 0
        assert set(policy.state) <= {
            "drafted token",
            "row",
            "acceptance",
            "error",
            "tokens of a round",
            "cost of a round",
            "plain token",
            "tokens since a trial",
        }

    @pytest.mark.parametrize("early", [True, False])
    def test_next_start_uses_it(self, early):
        machine = Machine(drafted=0.03)
        first = LearnedPolicy()
        write(first, machine, 1000, early=early)
        again = LearnedPolicy(first.state)
        _, lengths = write(again, machine, 90, early=early)
        assert lengths[0] == 0
        assert lengths.count(0) > 70

    def test_trials_come_over_short_starts_too(self):
        machine, kept, tried = Machine(drafted=0.03), {}, 0
        for start in range(20):
            policy = LearnedPolicy(kept)
            _, lengths = write(policy, machine, 40, seed=start)
            tried += start >= 10 and any(lengths)
            kept = policy.state
        assert 0 < tried < 10

    def test_a_state_with_strange_numbers_is_taken(self):
        policy = LearnedPolicy({"plain token": 1e-9, "acceptance": 7.0, "error": 1e9, "other": 1.0})
        _, lengths = write(policy, Machine(), 3000)
        assert lengths[-100:].count(0) < 20
