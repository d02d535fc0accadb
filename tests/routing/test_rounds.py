"""What lossless mode does in a round: look up, draft, or compute alone. Only numbers; no model runs here."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearbx_mlx.routing.lookup import LONGEST, PRIOR, SHORTEST, Lookup, LookupAgreement
from gearbx_mlx.routing.rounds import (
    FIRST_PASSES,
    MOST_ROWS,
    PROBED,
    REMEMBERED,
    CostRule,
    Costs,
    LearnedCosts,
    Rounds,
)


def longest_run(tokens: list[int]) -> tuple[int, list[int]]:
    """By a scan of the whole text: the longest run at its end that occurs before, and what followed it last."""
    found, place = 0, 0
    for end in range(SHORTEST, len(tokens)):
        run = 0
        while run < min(LONGEST, end) and tokens[end - 1 - run] == tokens[-1 - run]:
            run += 1
        if run >= SHORTEST and run >= found:
            found, place = run, end
    return found, tokens[place:] if found else []


def going_on(period: list[int], count: int) -> list[int]:
    """The first `count` tokens of a text that repeats a period."""
    return list(itertools.islice(itertools.cycle(period), count))


class TestLookup:
    @given(st.lists(st.integers(0, 3), max_size=40))
    def test_finds_what_a_scan_of_the_text_finds(self, tokens):
        lookup, text = Lookup(LookupAgreement()), []
        for token in tokens:
            text.append(token)
            lookup.follow(text, prompt=0)
        run, following = longest_run(tokens)
        if len(tokens) <= 16:  # all earlier places are compared
            assert (lookup.run, lookup.proposed(40)) == (run, going_on(following, 40))
        assert lookup.run <= run
        assert lookup.proposed(3) == lookup.proposed(40)[:3]

    @pytest.mark.parametrize("period", [1, 2, 3, 15])
    def test_a_text_that_goes_round_is_proposed_as_far_as_is_wanted(self, period):
        text = going_on(list(range(period)), 100)
        lookup = Lookup(LookupAgreement())
        lookup.follow(text, prompt=100)
        assert lookup.run == LONGEST
        assert lookup.proposed(15) == going_on(list(range(period)), 115)[100:]

    def test_a_prompt_at_once_is_as_token_by_token(self):
        text = np.random.default_rng(0).integers(0, 9, 30).tolist() * 10
        one, many, grown = Lookup(LookupAgreement()), Lookup(LookupAgreement()), []
        one.follow(text, prompt=300)
        for token in text:
            grown.append(token)
            many.follow(grown, prompt=300)
        assert (one.run, one.proposed(20)) == (many.run, many.proposed(20))
        assert (one.run, one.proposed(20)) == (LONGEST, text[:20])

    def test_another_text_is_looked_up_in_itself_alone(self):
        lookup = Lookup(LookupAgreement())
        lookup.follow([1, 2, 3, 4, 1, 2], prompt=6)
        assert lookup.proposed(9) == [3, 4, 1, 2, 3, 4, 1, 2, 3]
        lookup.follow([3, 4, 1, 2], prompt=4)
        assert lookup.proposed(9) == []

    def test_what_was_written_counts_and_the_prompt_does_not(self):
        agreement = LookupAgreement()
        before = agreement.probabilities(2, 3)
        text = [1, 2, 3, 1, 2, 3]
        lookup = Lookup(agreement)
        lookup.follow(text, prompt=6)
        assert (
            agreement.probabilities(2, 3)
            == before
            == pytest.approx(list(itertools.accumulate([PRIOR[2], PRIOR[3], PRIOR[4]], lambda a, b: a * b)))
        )
        text.append(1)  # as proposed, after the run 1 2 3
        lookup.follow(text, prompt=6)
        assert agreement.probabilities(3, 1)[0] > PRIOR[3]
        text.append(9)  # not as proposed, after the run 1 2 3 1
        lookup.follow(text, prompt=6)
        assert agreement.probabilities(4, 1)[0] < PRIOR[4]

    def test_a_token_takes_as_long_in_a_long_text_as_in_a_short_one(self):
        """A pair that occurs everywhere must not make every token search the whole text."""

        class Text(list):
            looked_at = 0

            def __getitem__(self, place):
                found = super().__getitem__(place)
                self.looked_at += len(found) if isinstance(place, slice) else 1
                return found

        looked_at = []
        for length in (2000, 32000):
            lookup, text = Lookup(LookupAgreement()), Text([7] * length)
            lookup.follow(text, prompt=length)
            before = text.looked_at
            for _ in range(100):
                text.append(7)
                lookup.follow(text, prompt=length)
            looked_at.append(text.looked_at - before)
        assert looked_at[0] == looked_at[1] > 0


def costs(draft=0.25, first=1.0, row=0.0, measured=True):
    return Costs(lambda: draft, lambda rows: first + row * (rows - 1), measured=measured)


def learned(agreement, share, runs=range(SHORTEST, LONGEST + 1)):
    """Of every ten proposals after runs of these lengths, `share` are right."""
    for number, run in itertools.product(range(200), runs):
        agreement.add(run, number % 10 < 10 * share)


class TestWhatIsLookedUp:
    def test_a_text_that_repeats_is_proposed_as_far_as_one_pass_reaches(self):
        rounds = Rounds(costs())
        learned(rounds.agreement, 1.0)
        assert rounds.looked_up(LONGEST, 40) == 15
        assert rounds.looked_up(LONGEST, 4) == 4
        assert rounds.looked_up(0, 15) == 0

    def test_a_single_token_is_proposed_where_no_more_may_follow(self):
        rounds = Rounds(costs())
        learned(rounds.agreement, 1.0)
        assert rounds.looked_up(LONGEST, 1) == 1

    def test_what_is_never_right_is_not_proposed(self):
        rounds = Rounds(costs(row=0.01))
        learned(rounds.agreement, 0.0)
        assert rounds.looked_up(2, 15) == 0

    def test_where_rows_read_no_bytes_a_proposal_is_as_long_as_its_computation_is_worth(self):
        """If ten rows cost as much as a pass over the weights, a token has to be right in at least one case of ten."""
        rounds = Rounds(costs(row=0.0, measured=False))
        assert PRIOR[2] * PRIOR[3] > 0.1 > PRIOR[2] * PRIOR[3] * PRIOR[4]
        assert rounds.looked_up(2, 15) == 2
        learned(rounds.agreement, 1.0)
        assert rounds.looked_up(2, 15) == 15
        rounds = Rounds(costs(row=0.4, measured=False))  # experts of its own for each row, which are dearer
        assert rounds.looked_up(2, 15) == 0

    def test_dear_rows_make_proposals_shorter(self):
        lengths = []
        for row in (0.0, 0.05, 0.2, 0.5, 1.0):
            rounds = Rounds(costs(row=row))
            learned(rounds.agreement, 0.8)
            lengths.append(rounds.looked_up(2, 15))
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == 15
        assert lengths[-1] == 0

    def test_drafts_that_cost_less_go_first(self):
        rounds = Rounds(costs(draft=0.05))
        learned(rounds.agreement, 0.5)
        assert rounds.looked_up(2, 15) > 0
        for _ in range(200):
            rounds.note_drafts(10, 11)  # 1.5 for 11 tokens; half of the proposals right: 1 for 2 tokens
        assert rounds.looked_up(2, 15) == 0


def spent_on(rounds, drafted, accepted, tokens=2000):
    """A text's cost relative to the top gear alone, if every draft has one length and one accepted share."""
    draws = np.random.default_rng(0)
    spent = made = drafts = 0
    while made < tokens:
        count = drafted if rounds.drafts() else 0
        right = int(np.cumprod(draws.random(count) < accepted).sum())
        spent += count * rounds.costs.draft() + rounds.costs.verification(1 + count)
        if count:
            rounds.note_drafts(count, right + 1)
            drafts += 1
        made += right + 1
    return spent / (made * rounds.costs.verification(1)), drafts


class TestNeverMuchSlower:
    def test_before_any_draft_a_token_costs_what_the_top_gear_alone_costs(self):
        rounds = Rounds(costs(first=3.0))
        assert rounds.with_drafts() == rounds.alone() == 3.0

    @pytest.mark.parametrize(("draft", "row"), [(1.2, 0.05), (0.9, 0.4), (0.3, 1.0)])
    @pytest.mark.parametrize("accepted", [0.0, 0.3, 0.6])
    def test_drafts_that_lose_are_tried_once_in_a_while(self, draft, row, accepted):
        ratio, drafts = spent_on(Rounds(costs(draft, 1.0, row)), 1, accepted)
        assert ratio < 1.06
        assert drafts > 2000 / PROBED / 3

    def test_drafts_that_pay_go_on(self):
        ratio, _ = spent_on(Rounds(costs(0.25)), 5, 0.9)
        assert ratio < 0.6

    def test_costs_that_nobody_measured_leave_drafts_as_calibrated(self):
        rounds = Rounds(Costs(lambda: 2.0, lambda rows: 1.0))
        _, drafts = spent_on(rounds, 3, 0.1, tokens=200)
        assert drafts > 150

    def test_drafts_come_back_when_they_pay_again(self):
        now = {"draft": 1.5}
        rounds = Rounds(Costs(lambda: now["draft"], lambda rows: 1.0, measured=True))
        assert spent_on(rounds, 4, 0.9)[0] > 1
        now["draft"] = 0.2
        ratio, _ = spent_on(rounds, 4, 0.9)
        assert ratio < 0.6


def measured(seconds, draft=0.3, times=REMEMBERED + FIRST_PASSES):
    found = LearnedCosts()
    for _ in range(times):
        found.add_draft(draft)
        for rows, value in seconds.items():
            if found.wants_verification(rows):
                found.add_verification(rows, value)
    return found


class TestLearnedCosts:
    def test_are_known_once_the_top_gear_alone_was_measured(self):
        assert not LearnedCosts().ready
        assert not measured({8: 2.0}).ready
        assert not measured({1: 1.0}, times=FIRST_PASSES).ready  # which compile
        assert measured({1: 1.0}).ready

    def test_lie_between_those_that_were_measured_and_never_fall(self):
        found = measured({1: 1.0, 3: 2.0, 5: 1.5, 9: 4.0})
        rows = (1, 2, 3, 4, 5, 7, 9, 16)
        assert [found.verification(row) for row in rows] == [1, 1.375, 1.75, 1.75, 1.75, 2.875, 4, 4]
        assert found.draft() == 0.3

    def test_more_rows_than_were_measured_cost_no_more(self):
        assert measured({1: 2.0, 3: 3.0}).verification(16) == 3.0

    def test_are_medians_of_the_latest_passes(self):
        found = measured({1: 1.0})
        for value in [50.0] * (REMEMBERED // 2):
            found.add_verification(1, value)
        assert found.verification(1) == 1.0
        found.add_verification(1, 50.0)
        assert found.verification(1) == 50.0

    def test_one_bad_measurement_moves_its_neighbours_little(self):
        found = measured({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3})
        found.add_verification(3, 20.0)
        assert found.verification(8) < 4

    def test_what_is_not_measured_follows_the_machine_and_comes_back_with_it(self):
        found = measured({1: 1.0, 4: 1.2, 8: 1.4})
        for slowness in (2.0, 1.0):
            for _ in range(REMEMBERED):
                found.add_draft(0.3 * slowness)
                found.add_verification(4, 1.2 * slowness)
            assert [found.verification(rows) for rows in (1, 4, 8)] == pytest.approx(
                [1.0 * slowness, 1.2 * slowness, 1.4 * slowness]
            )

    def test_drafts_that_are_disturbed_now_and_then_change_nothing_else(self):
        """Slow passes are more frequent than fast ones: averages that only followed would creep upwards."""
        found = measured({1: 1.0, 8: 1.4})
        for number in range(300):
            found.add_draft(0.3 if number % 3 else 0.9)
        assert [found.verification(rows) for rows in (1, 8)] == pytest.approx([1.0, 1.4])

    def test_what_is_well_known_is_measured_rarely(self):
        found = LearnedCosts()
        wanted = 0
        for _ in range(320):
            if found.wants_verification(1):
                found.add_verification(1, 1.0)
                wanted += 1
        assert REMEMBERED <= wanted <= REMEMBERED + 320 // 16

    def test_an_earlier_measurement_is_where_they_begin(self):
        found = LearnedCosts((0.3, {1 + rows: 1.0 + 0.1 * rows for rows in range(MOST_ROWS)}))
        assert found.ready
        assert found.verification(16) == pytest.approx(2.5)

    def test_a_draft_goes_on_where_further_rows_cost_little_and_ends_where_they_cost_much(self):
        lengths = []
        for row in (0.02, 0.5):
            rule = CostRule(lambda entropy: 0.9, costs(0.2, 1.0, row))
            for _ in range(30):  # until its own average has settled
                rule.begin()
                length = 1
                while length < 15 and rule.goes_on(0.0):
                    length += 1
            lengths.append(length)
        assert lengths[0] > 2 * lengths[1]

    def test_before_any_measurement_drafts_end_where_half_of_them_are_likely_wrong(self):
        rule = CostRule(lambda entropy: 1.0 - entropy, LearnedCosts())
        rule.begin()
        assert rule.goes_on(0.4)  # 0.6
        assert not rule.goes_on(0.4)  # 0.36
