"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

import ringtrue as rt
from gloo import Pool
from ringtrue import scope

os.environ["RINGTRUE_TUNED"] = "off"  # what somebody measured on this machine is none of the tests'


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test of a backend whose claims refuse the call is skipped with the reasons: claims decide what it must pass.

    Not where no backend is left that can: a claim narrowed by mistake must not take a whole feature out of the tests.
    README's table, which is held against the claims, shows every other one (test_support.py).
    """
    try:
        return (yield)
    except rt.UnsupportedError as error:
        chosen = getattr(pyfuncitem, "callspec", None)
        names = [] if chosen is None else [getattr(x, "name", x) for x in chosen.params.values()]
        refused = any(isinstance(name, str) and f"backend {name!r} cannot take" in str(error) for name in names)
        if refused and "these can: " in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def nothing_entered_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process in which no scope was ever entered: that decides what a recompute may do."""
    monkeypatch.setattr(scope, "_entered", set())


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes for the whole session, started by the first task (see gloo.py)."""
    pool = Pool(4)
    yield pool
    pool.close()
