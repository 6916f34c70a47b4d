"""Every pair meets once, and the rank at fault is named."""

from itertools import combinations

import pytest

from lakh.health.pairs import PairResult, find_faulty_ranks, pair_rounds


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_a_rank_has_one_partner_in_a_round(ranks: int) -> None:
    rounds = pair_rounds(ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))


def results(ranks: int, slow: int | None = None, wrong: int | None = None) -> list[PairResult]:
    return [
        PairResult(a, b, 10.0 if slow not in (a, b) else 4.0, is_right=wrong not in (a, b))
        for a, b in combinations(range(ranks), 2)
    ]


def test_the_rank_at_fault_is_named() -> None:
    assert find_faulty_ranks(results(6)) == {}
    assert find_faulty_ranks([]) == {}
    assert list(find_faulty_ranks(results(6, slow=2))) == [2]
    assert list(find_faulty_ranks(results(6, wrong=4))) == [4]
    assert list(find_faulty_ranks(results(2, wrong=0))) == [0, 1]  # two ranks: either may be at fault
