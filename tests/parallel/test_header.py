"""Agreement: all ranks see the same headers and raise from them alike."""

from __future__ import annotations

import math

import pytest

from ringtrue.errors import ArgumentError, DisagreementError, ParallelError, PeerError
from ringtrue.parallel.comm import connect
from ringtrue.parallel.header import SIZE, Header, agree
from ringtrue.parallel.twin import World


def on_all(headers: list[Header]) -> list:
    """What agree gives on every rank: the headers, or the error it raises."""

    def body(rank):
        group = connect(rank, len(headers), 1, 9.0).header
        try:
            return agree(group, headers[rank.rank])
        except (ParallelError, ArgumentError) as error:
            return error

    return World(len(headers)).run(body)


def header(**changes) -> Header:
    fields = {"call": 3, "what": "attention", "same": {"dtype": "float32", "scale": 0.125}, "own": {}}
    return Header(**{**fields, **changes})


def test_every_rank_gets_every_header() -> None:
    """In rank order, the own part as JSON gives it back."""
    sent = [header(own={"q": rank, "wanted": [True, False], "mask": None}) for rank in range(3)]
    assert on_all(sent) == [tuple(sent)] * 3


def test_one_rank_talks_to_nobody() -> None:
    group = connect(None, 1, 1, 9.0).header
    assert agree(group, header(own={"q": (1, 2)})) == (header(own={"q": [1, 2]}),)


def test_traffic_is_one_fixed_size() -> None:
    def body(rank):
        group = connect(rank, 1, 2, 9.0).header
        for call in range(3):
            agree(group, header(call=call, own={"text": "x" * 100 * call * rank.rank}))
        return [event.bytes for event in rank.log]

    assert World(2).run(body) == [[SIZE] * 3] * 2


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"same": {"dtype": "bfloat16", "scale": 0.125}}, "dtype: ranks 0,2-3 float32, rank 1 bfloat16"),
        ({"same": {"dtype": "float32", "scale": 0.5}}, "scale: ranks 0,2-3 0.125, rank 1 0.5"),
        ({"same": {"dtype": "float32"}}, "scale: ranks 0,2-3 0.125, rank 1 not given"),
        ({"call": 4}, "call number: ranks 0,2-3 3, rank 1 4"),
        ({"what": "gather"}, "what: ranks 0,2-3 attention, rank 1 gather"),
    ],
)
def test_ranks_that_differ_raise_one_text(changes: dict, line: str) -> None:
    """Every rank names the field and the value per rank, and only fields that differ."""
    results = on_all([header(), header(**changes), header(), header()])
    assert all(type(error) is DisagreementError for error in results)
    assert len({str(error) for error in results}) == 1
    assert str(results[0]).splitlines()[1:] == [f"  {line}"]


def test_several_values_of_several_fields() -> None:
    results = on_all([header(same={"shape": [1, 2], "causal": n > 1, "backend": "b"}, call=n) for n in range(3)])
    assert str(results[2]).splitlines() == [
        "ranks disagree about this attention",
        "  call number: rank 0 0, rank 1 1, rank 2 2",
        "  causal: ranks 0-1 false, rank 2 true",
    ]


def test_values_that_equal_themselves() -> None:
    """A NaN is no disagreement; true and 1 are."""
    assert isinstance(on_all([header(same={"softcap": math.nan})] * 2)[0], tuple)
    assert isinstance(on_all([header(same={"causal": True}), header(same={"causal": 1})])[0], DisagreementError)


def test_refusal_travels() -> None:
    """The rank that refused goes on to raise its own error; the others quote it, whatever else differs."""
    results = on_all([header(), header(call=9, error="[no-fit] D is 7\n  limit: 8"), header()])
    assert results[1][1].error == "[no-fit] D is 7\n  limit: 8"
    for rank in (0, 2):
        assert type(results[rank]) is PeerError
        assert "rank 1: [no-fit] D is 7\n  limit: 8" in str(results[rank])


def test_all_refusals_are_quoted() -> None:
    results = on_all([header(error="first"), header(), header(error="third")])
    assert isinstance(results[0], tuple)
    assert isinstance(results[2], tuple)
    assert "rank 0: first" in str(results[1])
    assert "rank 2: third" in str(results[1])


@pytest.mark.parametrize("text", ["x" * 9000, 'ü\n\t"' * 4000, "\0" * 9000, "🏔" * 3000])
def test_long_refusal_is_cut(text: str) -> None:
    results = on_all([header(), header(error=text)])
    quoted = str(results[0]).partition("rank 1: ")[2]
    assert quoted.endswith("…")
    assert text.startswith(quoted[:-1])
    assert len(quoted.encode()) > 500
    assert isinstance(results[1], tuple)


def test_long_refusal_beside_long_fields() -> None:
    results = on_all([header(), header(own={"lengths": [7] * 4000}, error="too long")])
    assert "rank 1: too long" in str(results[0])


def test_header_that_is_too_large() -> None:
    """The rank raises ArgumentError and names the field; its peers do not wait in vain."""
    results = on_all([header(), header(own={"lengths": [7] * 4000, "q": 1})])
    assert type(results[1]) is ArgumentError
    assert "'lengths'" in str(results[1])
    assert type(results[0]) is PeerError
    assert "'lengths'" in str(results[0])
    with pytest.raises(ArgumentError, match="4092 bytes"):
        agree(connect(None, 1, 1, 9.0).header, header(own={"lengths": [7] * 4000}))
