"""An audit inside of somebody's own tests: what passes, fails, is skipped, and what a failure says."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ringtrue.audit.judge import Verdict
from ringtrue.audit.outcome import Outcome
from ringtrue.audit.subject import Call, Plain, Says
from ringtrue.testing import WrongError, audit_of, checks_for, told

NAME = f"{__name__}:attend"


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Right, but for causal calls, in which it looks one key too far."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1) if is_causal else None
    return functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2)


def question(only: str, **options: object):  # type: ignore[no-untyped-def]
    (found,) = checks_for(NAME, only=only, **options)  # type: ignore[arg-type]
    return found


def test_a_right_check_passes() -> None:
    question("call/length-5/float32").assert_right()


def test_a_wrong_check_says_what_was_found_and_how_to_see_it_again() -> None:
    with pytest.raises(WrongError) as caught:
        question("call/causal/float32", seed=3).assert_right()
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{NAME} call/causal/float32: wrong"
    assert [line.split()[:2] for line in lines[1:5]] == [[name, "FAIL"] for name in ("out", "dq", "dk", "dv")]
    assert lines[-1] == f"  replay: ringtrue audit {NAME} --case call/causal/float32 --seed 3"


def test_the_likely_fault_is_told() -> None:
    wrong = Outcome("mine", "call/gqa/float32", "wrong", "", (Verdict("dk", ok=False, problem="missing"),), "swapped")
    assert told(replace(wrong, replay="do it")) == (
        "mine call/gqa/float32: wrong\n  dk    FAIL  missing\n  likely: swapped\n  replay: do it"
    )


def test_what_it_does_not_claim_is_skipped() -> None:
    with pytest.raises(unittest.SkipTest, match="refused as claimed: fewer key heads"):
        question("call/gqa/float32").assert_right()


def test_what_cannot_run_is_skipped() -> None:
    away = Plain("away", lambda call: call.query, missing="it is not installed")
    (one,) = checks_for(away, only="call/length-5/float32")
    with pytest.raises(unittest.SkipTest, match="not run: it is not installed"):
        one.assert_right()


def test_claims_are_held_to(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text('gqa = true\ndtypes = ["float32"]')
    one = question("call/gqa/float32", claims=tmp_path / "claims.toml")
    assert one.outcome().verdict == "claimed but refused"
    assert one.replay.endswith(f"--claims {tmp_path / 'claims.toml'}")
    one = question("call/gqa/float32", claims=Says(gqa=True))
    assert one.outcome().verdict == "claimed but refused"


def test_a_layout_is_passed_on_and_replayed() -> None:
    one = question("call/length-33/float32", layout="bhsd")
    assert one.outcome().bad  # it takes (B, S, H, D)
    assert one.replay.endswith("--layout bhsd")


def test_threads_and_warnings_are_as_before() -> None:
    def warns(call: Call) -> Tensor:
        warnings.warn("old", UserWarning, stacklevel=1)
        assert torch.get_num_threads() == 1
        query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    (one,) = checks_for(Plain("mine", warns), only="call/length-5/float32")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="old"):
            one.assert_right()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: checks_for("nowhere:attend"), "cannot import 'nowhere'"),
        (lambda: checks_for(NAME, group="parallel"), "group is smoke or full"),
        (lambda: checks_for(NAME, layout="sbhd"), "layout is one of"),
        (lambda: checks_for(NAME, dtypes=["fp8"]), "dtypes are"),
    ],
)
def test_mistakes(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


test_audit_of = audit_of(NAME, only="call/length-*/float32")


def test_audit_of_has_a_test_for_each_check_by_its_id(request: pytest.FixtureRequest) -> None:
    names = [item.name for item in request.session.items if item.name.startswith("test_audit_of[")]
    assert len(names) == 5 or len(request.session.items) < 10
    (mark,) = test_audit_of.pytestmark  # type: ignore[attr-defined]
    assert mark.kwargs["ids"] == [f"call/length-{n}/float32" for n in (1, 5, 16, 33, 129)]


@pytest.mark.parametrize("check", checks_for(NAME, only="call/one-*/float32"))
def test_checks_for(check, request: pytest.FixtureRequest) -> None:  # type: ignore[no-untyped-def]
    check.assert_right() if "gqa" not in check.id else None
    assert request.node.name == f"test_checks_for[{check.id}]"
