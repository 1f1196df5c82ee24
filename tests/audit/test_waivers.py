"""A waiver holds while what it names is wrong; everything that is the matter with one names its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtrue.audit.judge import Verdict
from ringtrue.audit.outcome import CRASH, NOT_RUN, PASS, REFUSED, WAIVED, WRONG, Outcome, exit_code
from ringtrue.audit.waivers import Waiver, apply, read

GOOD = """
# known

[[waive]]
subject = "torch/*"
check = "call/causal*"
reason = "fixed in the next release"
link = "https://example.org/1"

[[waive]]
subject = "mine"
check = "*"
reason = "later"
link = "https://example.org/2"
"""


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "waivers.toml"
    path.write_text(text, "utf-8")
    return path


def waiver(check: str, subject: str = "torch/*") -> Waiver:
    return Waiver(subject, check, "known", "https://example.org", "waivers.toml, line 4")


def test_read(tmp_path: Path) -> None:
    first, second = read(file(tmp_path, GOOD))
    assert (first.subject, first.check, first.reason) == ("torch/*", "call/causal*", "fixed in the next release")
    assert (first.place, second.place) == ("waivers.toml, line 4", "waivers.toml, line 10")


def test_an_empty_file_waives_nothing(tmp_path: Path) -> None:
    assert read(file(tmp_path, "# nothing known\n")) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('reason = "later"\n', ""), "waivers.toml, line 10: it has no reason"),
        (('reason = "later"', 'reason = " "'), "waivers.toml, line 10: it has no reason"),
        (('link = "https://example.org/2"\n', ""), "waivers.toml, line 10: it has no link"),
        (('"https://example.org/2"', '"ask me"'), "waivers.toml, line 10: link is not an address: 'ask me'"),
        (('reason = "later"', 'resaon = "later"'), "line 10: unknown key 'resaon': an entry has subject, check"),
        (('check = "call/causal*"\n', ""), "waivers.toml, line 4: it has no check"),
        (("[[waive]]", "[[waived]]"), "holds .*waive.* entries and nothing else: waived"),
        (('"later"', '"later'), "waivers.toml: .*line 13"),
    ],
)
def test_problems_name_their_line(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(file(tmp_path, GOOD.replace(*change)))


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = GOOD.replace('reason = "later"\n', "").replace('link = "https://example.org/1"\n', "")
    with pytest.raises(ValueError, match=r"line 4: it has no link\n.*line 9: it has no reason"):
        read(file(tmp_path, text))


def test_entries_written_in_another_way_are_numbered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"waivers\.toml, entry 2: it has no link"):
        one = '{subject = "a", check = "b", reason = "c", link = "https://example.org"}'
        read(file(tmp_path, f'waive = [{one}, {{subject = "a", check = "b", reason = "c"}}]'))


def test_wrong_outcomes_that_match_are_waived() -> None:
    measured = (Verdict("dk", ok=False, error_2=2.0, bound_2=1.0),)
    outcomes = [
        Outcome("torch/flash", "call/causal/float32", WRONG, "off", measured),
        Outcome("torch/flash", "call/gqa/float32", WRONG),
        Outcome("torch/flash", "call/causal-wide/float32", PASS),
        Outcome("ours/native", "call/causal/float32", CRASH),
        Outcome("torch/flash", "call/causal-tall/float32", CRASH),
    ]
    found, errors = apply(outcomes, [waiver("call/causal*")])
    assert errors == []
    assert [o.verdict for o in found] == [WAIVED, WRONG, PASS, CRASH, WAIVED]
    assert found[0].reason == "known (https://example.org); wrong: off"
    assert found[0].quantities == measured
    assert found[4].reason == "known (https://example.org); crash"
    assert exit_code(found) == 1
    assert exit_code([found[0], found[2]]) == 0


@pytest.mark.parametrize(
    ("check", "subject", "verdicts", "told"),
    [
        ("call/causal*", "torch/*", (PASS, PASS, REFUSED), "nothing of this is wrong any more (2 pass, 1 refused as"),
        ("call/causal*", "torch/*", (PASS, WRONG), ""),
        ("call/causal*", "torch/*", (NOT_RUN,), ""),
        ("call/causal*", "flex", (PASS,), ""),
        ("chunk/*", "torch/*", (PASS,), ""),
        ("ranks/ring-2*", "torch/*", (PASS,), ""),
        ("call/@q_len=3,k_len=3/float32", "torch/*", (PASS,), ""),
        ("call/causual*", "torch/*", (WRONG,), "there is no such check"),
        ("call/causual*", "flex", (WRONG,), "there is no such check"),
    ],
)
def test_stale_waivers(check: str, subject: str, verdicts: tuple[str, ...], told: str) -> None:
    outcomes = [Outcome("torch/flash", f"call/causal/{n}", verdict) for n, verdict in enumerate(verdicts)]
    _, errors = apply(outcomes, [waiver(check, subject)])
    assert bool(errors) == bool(told)
    if told:
        assert errors[0].startswith(f"waivers.toml, line 4: {subject} {check}: {told}")


def test_a_second_waiver_of_the_same_fault_is_not_stale() -> None:
    outcomes = [Outcome("torch/flash", "call/causal/float32", WRONG)]
    assert apply(outcomes, [waiver("call/causal*"), waiver("call/c*")])[1] == []
