"""Modes as text."""

from __future__ import annotations

import pytest

from ringtrue.cli.demo.settings import Mode, Settings, UsageError, parse_modes


@pytest.mark.parametrize(
    ("text", "mode", "name"),
    [
        ("ulysses2", Mode(2, 1), "ulysses2"),
        ("ring3", Mode(1, 3), "ring3"),
        ("2x2", Mode(2, 2), "2x2"),
        ("4x1", Mode(4, 1), "ulysses4"),
        (" 1x2 ", Mode(1, 2), "ring2"),
    ],
)
def test_a_mode(text: str, mode: Mode, name: str) -> None:
    assert parse_modes(text) == (mode,)
    assert mode.name == name
    assert mode.ranks == mode.ulysses * mode.ring


def test_each_mode_once_in_the_order_given() -> None:
    assert parse_modes("ring2,2x2,1x2,") == (Mode(1, 2), Mode(2, 2))


@pytest.mark.parametrize("text", ["", ",", "ulysses", "ring-2", "2y2", "ring2.5", "flat"])
def test_what_is_no_mode_is_told_what_modes_are(text: str) -> None:
    with pytest.raises(UsageError, match="ulyssesU, ringR and UxR"):
        parse_modes(text)


@pytest.mark.parametrize("text", ["ring0", "ulysses1", "1x1", "5x5"])
def test_degrees_have_limits(text: str) -> None:
    with pytest.raises(UsageError, match="2 to 16"):
        parse_modes(text)


def test_text_is_ragged() -> None:
    assert Settings(text_tokens=23).text_lengths == (23, 11)
    assert Settings(text_tokens=1).text_lengths == (1, 0)
