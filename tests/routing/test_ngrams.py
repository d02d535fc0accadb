"""Table of n-grams: proposals, acceptance rates, limits."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearbx_mlx.routing.ngrams import LONGEST_NGRAM, LONGEST_RUN, NgramTable

SMALL = st.lists(st.integers(0, 3), max_size=80)


def read_all(table, tokens, is_generated=False):
    for token in tokens:
        table.read(token, is_generated)


def longest(tokens):
    """Return the length of the longest suffix of at most four tokens that occurs earlier, and what followed it last."""
    for count in range(min(LONGEST_NGRAM, len(tokens) - 1), 0, -1):
        for place in range(len(tokens) - 1, count - 1, -1):
            if tokens[place - count : place] == tokens[-count:]:
                return count, tokens[place]
    return 0, None


class TestProposals:
    @given(SMALL)
    def test_table_of_one_sequence_finds_longest_ngram(self, tokens):
        table = NgramTable()
        for place in range(len(tokens)):
            table.read(tokens[place])
            count, following = longest(tokens[: place + 1])
            assert min(table.run, LONGEST_NGRAM) == count
            if table.run < LONGEST_NGRAM:
                assert table.proposed(1) == [following][:count]

    @given(SMALL, st.integers(1, 15))
    def test_proposal_follows_an_earlier_run(self, tokens, count):
        table = NgramTable()
        read_all(table, tokens)
        proposed = table.proposed(count)
        assert len(proposed) == (count if table.run else 0)
        if table.run:
            run = tokens[-table.run :]
            continued = [tokens[place + len(run) :] for place in range(len(tokens) - len(run))]
            starts = [place for place in range(len(tokens) - len(run)) if tokens[place : place + len(run)] == run]
            # after the end of the text the proposal repeats itself
            assert any(proposed == (continued[place] * count)[:count] for place in starts), (run, proposed)

    def test_copied_passage_continues_at_its_source(self):
        table = NgramTable()
        source = [*range(100, 130)]
        read_all(table, [*source, 1, 2, *range(110, 114), 9, *source[:12]])
        assert table.run == 12
        assert table.proposed(15) == source[12:27]

    def test_end_of_sequence_repeats_its_period(self):
        table = NgramTable()
        read_all(table, [1, 2, 3, 1, 2, 3, 1, 2])
        assert table.proposed(7) == [3, 1, 2, 3, 1, 2, 3]


class TestTexts:
    def test_new_sequence_is_proposed_from_earlier_one(self):
        table = NgramTable()
        table.begin([1, 2, 3, 4, 5])
        read_all(table, [1, 2, 3, 4, 5])
        assert table.begin([9, 2, 3]) == 0
        read_all(table, [9, 2, 3])
        assert table.run == 2
        assert table.proposed(15) == [4, 5]  # not the next text

    def test_continued_sequence_is_read_once(self):
        table = NgramTable()
        read_all(table, [1, 2, 3, 4])
        assert table.begin([1, 2, 3, 4, 5, 6]) == 4
        read_all(table, [5, 6])
        assert [each >> 1 for each in table.tokens] == [1, 2, 3, 4, 5, 6]

    @given(st.lists(SMALL, max_size=4), SMALL)
    def test_table_of_kept_tokens_proposes_the_same(self, texts, last):
        table = NgramTable()
        for text in texts:
            table.begin()
            read_all(table, text)
        again = NgramTable(table.tokens)
        for each in (table, again):
            each.begin()
            read_all(each, last)
        assert again.run == table.run
        assert again.proposed(8) == table.proposed(8)

    def test_long_sequence_of_large_vocabulary_is_kept(self):
        table = NgramTable()
        read_all(table, [299_999 - 7 * place % 300_000 for place in range(100_000)])
        read_all(table, [299_999, 299_992])
        assert table.run == 2
        assert table.proposed(3) == [299_985, 299_978, 299_971]

    def test_oldest_tokens_go_above_the_limit(self):
        table = NgramTable(limit=2000)
        read_all(table, range(5000))
        assert len(table.tokens) <= 2000
        read_all(table, [4998, 4999])
        assert table.run == 2
        table.read(17)
        assert table.run == 0


class TestRates:
    def test_longer_runs_are_accepted_more_often_before_measurements(self):
        found = []
        for run in (1, 2, 4, LONGEST_RUN):
            table = NgramTable()
            read_all(table, [*range(LONGEST_RUN + 4), *range(LONGEST_RUN - run, LONGEST_RUN)])
            assert table.run == run
            found += table.probabilities(1)
        assert found == sorted(found)

    @pytest.mark.parametrize("is_generated", [True, False])
    def test_only_generated_tokens_change_the_rate(self, is_generated):
        table = NgramTable()
        for last in range(1000, 1060):  # what follows 7 is never what followed it before
            read_all(table, [7, last], is_generated)
        table.read(7)
        (first, *_) = [*table.probabilities(1), 0.0]
        assert (first < 0.03) is is_generated

    def test_probabilities_fall_along_the_proposal(self):
        table = NgramTable()
        read_all(table, [*range(40), *range(20)])
        found = table.probabilities(15)
        assert len(found) == 15
        assert found == sorted(found, reverse=True)
        assert all(0 < each <= 1 for each in found)


def test_memory_per_token_is_at_most_64_bytes():
    table = NgramTable()
    read_all(table, range(40_000))
    size = sum(part.itemsize * len(part) for part in vars(table).values() if isinstance(part, array))
    assert size / len(table.tokens) < 64
