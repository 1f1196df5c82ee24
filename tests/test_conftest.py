"""The hook in conftest.py skips what claims refuse, and only that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import conftest
import ringtrue as rt


def ends(error: Exception, **parameters: object) -> None:
    """How a test with these parameters ends that raised this error."""
    item = SimpleNamespace(callspec=SimpleNamespace(params=parameters))
    hook = cast("Any", conftest.pytest_pyfunc_call)(item)
    next(hook)
    hook.throw(error)


REFUSED = "backend 'mine' cannot take this call\n  - mine: [no-dbias] ..."


def test_a_call_that_others_can_take_is_skipped() -> None:
    error = rt.UnsupportedError(f"{REFUSED}\n  remedy: these can: native_math")
    with pytest.raises(pytest.skip.Exception, match="no-dbias"):
        ends(error, backend="mine")
    with pytest.raises(pytest.skip.Exception, match="no-dbias"):
        ends(error, subject=SimpleNamespace(name="mine"))


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        (f"{REFUSED}\n  remedy: no registered backend can", {"backend": "mine"}),
        (f"{REFUSED}\n  remedy: these can: native_math", {"backend": "another"}),
        ("no backend can take this call", {"backend": "mine"}),
    ],
    ids=["nobody can", "another backend's test", "auto"],
)
def test_everything_else_fails(text: str, parameters: dict[str, object]) -> None:
    with pytest.raises(rt.UnsupportedError):
        ends(rt.UnsupportedError(text), **parameters)
