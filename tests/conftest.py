"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

import ringtrue as rt
from gloo import Pool


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test of a backend whose claims refuse the call is skipped with the reasons: claims decide what it must pass."""
    try:
        return (yield)
    except rt.UnsupportedError as error:
        chosen = getattr(pyfuncitem, "callspec", None)
        names = [] if chosen is None else [getattr(x, "name", x) for x in chosen.params.values()]
        if any(isinstance(name, str) and f"backend {name!r} cannot take" in str(error) for name in names):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes for the whole session, started by the first task (see gloo.py)."""
    pool = Pool(4)
    yield pool
    pool.close()
