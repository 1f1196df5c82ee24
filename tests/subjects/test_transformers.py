"""transformers' attention functions as subjects, with the masks that its models make."""

from __future__ import annotations

import pytest
import torch

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import NOT_RUN, PASS, RAN_UNCLAIMED, REFUSED
from ringtrue.audit.subject import Subject
from ringtrue.subjects import found
from subjects.asking import call, told

pytest.importorskip("transformers")
SUBJECTS: dict[str, Subject] = {s.name.removeprefix("transformers/"): s for s in found("transformers", "cpu")}


def test_all_that_is_registered_is_there() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert {name.replace("|", "-") for name in ALL_ATTENTION_FUNCTIONS} <= SUBJECTS.keys()
    assert SUBJECTS["paged-eager"].unavailable()


@pytest.mark.parametrize("name", ["flash_attention_2", "paged-eager"])
def test_what_cannot_be_called_here_says_so(name: str) -> None:
    outcome = examine(SUBJECTS[name], Check(case("length-33")))
    assert outcome.verdict == NOT_RUN
    assert outcome.reason


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("sdpa", "causal-wide"),
        ("sdpa", "gqa"),
        ("sdpa", "bool-hqk"),
        ("sdpa", "window"),
        ("sdpa", "dropout"),
        ("sdpa/position_bias", "causal-float"),
        ("eager-llama", "keep-ragged"),
        ("eager-llama", "segments"),
        ("eager-llama", "dropout"),
        ("eager-gemma2", "softcap-masked"),
    ],
)
def test_right(name: str, asked: str) -> None:
    outcome = examine(SUBJECTS[name], Check(case(asked)))
    assert outcome.verdict == PASS, outcome


@pytest.mark.parametrize(
    ("name", "asked"), [("sdpa", "softcap"), ("eager-llama", "softcap"), ("sdpa/position_bias", "causal")]
)
def test_refused(name: str, asked: str) -> None:
    assert examine(SUBJECTS[name], Check(case(asked))).verdict == REFUSED


@pytest.mark.parametrize("asked", ["bool-qk", "float-blind", "keep-blind"])
def test_what_eager_drops_without_a_word_is_found(asked: str) -> None:
    """A bool mask is added as 0 and 1; a row that sees nothing is NaN, or the mean of what is hidden."""
    assert examine(SUBJECTS["eager-llama"], Check(case(asked))).verdict == RAN_UNCLAIMED


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("sdpa", "causal"),
        ("sdpa", "causal-keep"),
        ("sdpa/position_bias", "causal-bias"),
        ("eager-llama", "keep"),
        ("eager-gemma2", "softcap-masked"),
    ],
)
def test_the_lines_of_a_bug_report_compute_the_same(name: str, asked: str) -> None:
    x = call(asked)
    torch.testing.assert_close(told(SUBJECTS[name], x), SUBJECTS[name].run(x).out, rtol=0, atol=1e-6)
