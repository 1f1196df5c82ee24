"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gloo import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes for the whole session, started by the first task (see gloo.py)."""
    pool = Pool(4)
    yield pool
    pool.close()
