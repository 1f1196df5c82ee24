"""The error family, and what a message says."""

from __future__ import annotations

import inspect
import pickle

import pytest

import ringtrue as rt
from ringtrue import errors
from ringtrue.contract import Reason
from ringtrue.errors import message

FAMILY = {
    rt.ArgumentError: ValueError,
    rt.UnsupportedError: NotImplementedError,
    rt.GradientError: RuntimeError,
    rt.ScopeError: RuntimeError,
    rt.ParallelError: RuntimeError,
    rt.DisagreementError: rt.ParallelError,
    rt.PeerError: rt.ParallelError,
    rt.CommunicationError: rt.ParallelError,
}
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize(("kind", "base"), FAMILY.items())
def test_each_is_also_what_people_catch_without_knowing_us(kind: type[Exception], base: type[Exception]) -> None:
    assert issubclass(kind, (rt.RingtrueError, base))
    assert issubclass(kind, base)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_is_public_drawn_and_survives_a_process_boundary(kind: type[Exception]) -> None:
    assert getattr(rt, kind.__name__) is kind
    assert kind.__name__ in (errors.__doc__ or "")
    assert (kind.__doc__ or "").strip().endswith(".")
    again = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(again) is kind
    assert str(again) == "what happened"


def test_the_family_is_complete() -> None:
    assert set(CLASSES) == {rt.RingtrueError, *FAMILY}


def test_a_message_in_full() -> None:
    assert message("too long", call="f(x)", limit=3, value=4, remedy="cut it") == (
        "too long\n  call:   f(x)\n  limit:  3\n  value:  4\n  remedy: cut it"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "no"),
        ({"limit": 0}, "no\n  limit:  0"),
        ({"value": False, "remedy": "yes"}, "no\n  value:  False\n  remedy: yes"),
    ],
)
def test_only_what_was_given_is_shown_and_nought_is_something(given: dict[str, object], text: str) -> None:
    assert message("no", **given) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Reason("mask", "takes no mask"), "[mask] takes no mask"),
        (Reason("head-dim", "too wide", "64", "128"), "[head-dim] too wide (limit 64; value 128)"),
        (Reason("a", "b", value="c", remedy="d"), "[a] b (value c): d"),
    ],
)
def test_a_reason_as_text(reason: Reason, text: str) -> None:
    assert str(reason) == text
