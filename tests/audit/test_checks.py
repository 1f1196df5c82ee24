"""Ids are stable, unique and replayable; groups hold what they say."""

from __future__ import annotations

import pytest

from ringtrue.audit.checks import GROUPS, checks, of_the_truth


@pytest.mark.parametrize("group", GROUPS)
def test_ids_are_unique_and_find_their_check(group: str) -> None:
    found = checks(group, chunks=True)
    ids = [c.id for c in found]
    assert len(set(ids)) == len(ids) > 20
    for each in ids[:: len(ids) // 10]:
        assert [c.id for c in checks(group, chunks=True, only=each)] == [each]


def test_smoke_is_part_of_full() -> None:
    full = {c.id for c in checks("full", chunks=True)}
    assert {c.id for c in checks("smoke", chunks=True)} <= full


def test_a_seed_changes_the_numbers_and_no_id() -> None:
    one, other = checks("smoke", only="call/causal/*"), checks("smoke", only="call/causal/*", seed=3)
    assert [c.id for c in one] == [c.id for c in other] == ["call/causal/float32", "call/causal/bfloat16"]
    assert {c.case.numbers for c in one}.isdisjoint(c.case.numbers for c in other)


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match="smoke, full, parallel"):
        checks("everything")
    with pytest.raises(ValueError, match="float8"):
        checks("smoke", dtypes=["float8"])


def test_the_truth_has_checks_of_its_own() -> None:
    assert len(of_the_truth()) > 100
    assert [c.id for c in of_the_truth("truth/causal/*")] == ["truth/causal/float64"]
