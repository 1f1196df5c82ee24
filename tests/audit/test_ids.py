"""The text of a check: every check there is reads back, fields can be changed, and mistakes are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringtrue.audit.cases import case
from ringtrue.audit.checks import GROUPS, checks, of_the_truth
from ringtrue.audit.ids import described, parse
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.subject import Ranks


@pytest.mark.parametrize("group", GROUPS)
def test_every_check_reads_back(group: str) -> None:
    for check in checks(group, chunks=True, seed=3):
        assert parse(check.id, seed=3) == check


def test_checks_of_the_truth_read_back() -> None:
    for check in of_the_truth():
        assert parse(check.id) == check


@pytest.mark.parametrize("group", ["smoke", "parallel"])
def test_every_case_reads_back_from_what_it_is_made_of(group: str) -> None:
    for check in (c for c in checks(group, dtypes=("bfloat16",)) if c.law != "order"):
        text = replace(check, case=replace(check.case, id=described(check.case, check.ranks)))
        assert parse(text.id) == text


def test_the_text_says_what_differs_from_the_defaults() -> None:
    described_case = Case(
        "x", 3, 5, "some:bqk+keep", causal=-2, scale=0.5, heads=4, kv_heads=2, grad_lse=True, wants=""
    )
    assert described(described_case, Ranks(ring=3, lengths=(1, 0, 2))) == (
        "@q_len=3,k_len=5,mask=some:bqk+keep,causal=-2,scale=0.5,heads=4,kv_heads=2,grad_lse=true,wants="
        ",ring=3,lengths=1:0:2"
    )
    assert described(Case("x", 3, 5)) == "@q_len=3,k_len=5"


def test_fields_of_a_named_case_can_be_changed() -> None:
    check = parse("call/causal-wide@heads=1,k_len=4,causal=none/bfloat16", seed=2)
    wide = case("causal-wide")
    assert check.id == "call/causal-wide@heads=1,k_len=4,causal=none/bfloat16"
    assert replace(check.case, id=wide.id) == replace(wide, heads=1, k_len=4, causal=None, dtype=torch.bfloat16, seed=2)


def test_numbers_follow_from_the_text() -> None:
    one, same, other = (build(parse(f"call/@q_len=3,k_len={n}/float32").case) for n in (3, 3, 4))
    assert torch.equal(one.q, same.q)
    assert not torch.equal(one.q, other.q)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("causal", "is not LAW/CASE/DTYPE"),
        ("cal/causal/float32", "unknown law 'cal'.*call, chunk"),
        ("call/causal/float8", "unknown dtype 'float8'.*float32, bfloat16"),
        ("call/causal-wid/float32", "no case 'causal-wid' for the law call; did you mean causal-wide"),
        ("ranks/causal/float32", "no case 'causal' for the law ranks"),
        ("call/@q_len=3/float32", "names no case, so it must have q_len and k_len"),
        ("call/causal@head=1/float32", "'head=1'.*a field of q_len, k_len.*ulysses"),
        ("call/causal@heads/float32", "'heads'.*is not FIELD=VALUE"),
        ("call/causal@heads=two/float32", "heads in .* is an integer: 'two'"),
        ("call/causal@grad_lse=1/float32", "grad_lse in .* is true or false: '1'"),
        ("call/causal@heads=0/float32", "heads and channels are at least 1"),
        ("call/causal@q_len=-1/float32", "sizes are not negative"),
        ("call/causal@heads=3,kv_heads=2/float32", "2 key heads do not divide 3 heads"),
        ("call/causal@mask=sum:qk/float32", "mask 'sum:qk' is not one of some,"),
        ("call/causal@mask=some:xk/float32", "with axes of bhqk"),
        ("call/causal@mask=kept/float32", "mask 'kept' is not one of keep,"),
        ("call/causal@storage=odd/float32", "storage is one of plain,"),
        ("call/causal-wide@storage=fused/float32", "of one shape"),
        ("call/causal@values=odd/float32", "values is one of gaussian,"),
        ("call/causal@wants=x/float32", "letters q, k, v and b"),
        ("call/causal@dropout=1.0/float32", "dropout is at least 0 and less than 1"),
        ("ranks/ring-2@lengths=1:2:3/float32", "one entry a rank"),
        ("ranks/ring-2@ring=0/float32", "degrees are at least 1"),
        ("order/bfloat16-first@heads=1/float32", "sizes of their own"),
    ],
)
def test_mistakes_are_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text)
