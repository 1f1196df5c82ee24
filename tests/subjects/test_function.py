"""Anybody's callable: found by name, called as its signature says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS, REFUSED, WRONG
from ringtrue.audit.subject import Says
from ringtrue.subjects import found
from ringtrue.subjects.function import says_of, words_of


def bshd(query: Tensor, key: Tensor, value: Tensor, attn_mask=None, is_causal=False, scale=None) -> Tensor:  # type: ignore[no-untyped-def]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)
    return out.transpose(1, 2)


def bhsd(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def packed(qkv: Tensor) -> Tensor:
    return bshd(*qkv.unbind(2))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return bshd(q, k, v)


def with_lse(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, return_softmax_lse: bool = False):  # type: ignore[no-untyped-def]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale
    out = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    return (out, scores.logsumexp(-1)) if return_softmax_lse else out


def drops_its_mask(q: Tensor, k: Tensor, v: Tensor, mask=None) -> Tensor:  # type: ignore[no-untyped-def]
    return bshd(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask=None) -> Tensor:  # type: ignore[no-untyped-def]
    return bshd(q, k, v, attn_mask)


class Module:
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bshd(q, k, v)


INSTANCE = Module()
NOT_A_FUNCTION = 3


def verdicts(name: str, layout: str, *cases: str) -> list[str]:
    (subject,) = found(f"{__name__}:{name}", "cpu", layout=layout)
    return [examine(subject, Check(case(each))).verdict for each in cases]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("bshd", "bshd"), ("bhsd", "bhsd"), ("packed", "packed"), ("plain", "bshd"), ("with_lse", "bshd")],
)
def test_every_layout(name: str, layout: str) -> None:
    assert verdicts(name, layout, "length-33", "heads-equal-length") == [PASS, PASS]


def test_it_is_asked_what_its_signature_has_words_for() -> None:
    assert (
        verdicts("bshd", "bshd", "causal", "causal-wide", "bool-qk", "float-bhqk", "keep-ragged", "scale-one")
        == [PASS] * 6
    )
    assert verdicts("bhsd", "bhsd", "causal", "bool-qk", "scale-one") == [PASS, REFUSED, REFUSED]
    assert verdicts("packed", "packed", "cross-longer-keys", "causal") == [REFUSED, REFUSED]
    assert verdicts("drops_its_mask", "bshd", "bool-qk") == [WRONG]


def test_its_lse_is_judged_where_it_gives_one() -> None:
    (subject,) = found(f"{__name__}:with_lse", "cpu")
    outcome = examine(subject, Check(case("scale-one")))
    assert outcome.verdict == PASS
    assert "lse" in {v.quantity for v in outcome.quantities}


def test_claims_given_replace_those_read() -> None:
    (subject,) = found(f"{__name__}:plain", "cpu", claims=Says(masks=frozenset({"bool"})))
    assert examine(subject, Check(case("bool-qk"))).verdict == "claimed but refused"


def test_words_of_signatures() -> None:
    assert words_of(bshd) == {"mask": "attn_mask", "causal": "is_causal", "scale": "scale"}
    assert words_of(with_lse) == {"scale": "softmax_scale", "lse": "return_softmax_lse"}
    assert "dropout" in words_of(lambda q, k, v, **more: q)
    assert says_of(words_of(bhsd), "bhsd").causal == "top_left"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no.such.module:f", "cannot import 'no.such.module'"),
        (f"{__name__}:no_such", "has no 'no_such'"),
        (f"{__name__}:NOT_A_FUNCTION", "is a int, not a function"),
        (f"{__name__}:Module", "is a class"),
        (f"{__name__}:packed", "--layout packed"),
        ("nobody", "unknown subject 'nobody'"),
        ("ours/nobody", "unknown subject 'ours/nobody'"),
    ],
)
def test_names_that_mean_nothing(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        found(name, "cpu")


def test_an_unknown_layout() -> None:
    with pytest.raises(ValueError, match="bshd, bhsd, packed"):
        found(f"{__name__}:plain", "cpu", layout="sbhd")


@pytest.mark.parametrize("name", ["bshd", "bhsd", "packed", "with_lse"])
@pytest.mark.parametrize("asked", ["length-33", "causal", "scale-one"])
def test_its_source_computes_what_it_computes(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringtrue.audit.asked import call_of
    from ringtrue.audit.inputs import build

    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    layout = name if name in ("bhsd", "packed") else "bshd"
    (subject,) = found(f"{__name__}:{name}", "cpu", layout=layout)
    call = call_of(build(case(asked)))
    if subject.against(call):
        assert subject.source(call).startswith("# refused") == (asked != "length-33")
        return
    space = {
        "torch": torch,
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "attn_mask": call.dense(places=True),
    }
    exec(subject.source(call), space)
    assert torch.equal(space["out"], subject.run(call).out)  # type: ignore[arg-type]
    assert __name__ in sys.modules


@pytest.mark.parametrize("text", ["raise RuntimeError('no kernel')", "import sys; sys.exit('no GPU')", "def f(:"])
def test_a_module_that_does_not_import_says_why(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unimportable.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot import 'unimportable': \w+: (no kernel|no GPU|invalid syntax)"):
        found("unimportable:f", "cpu")


def test_what_reaches_it_inside_of_its_mask_is_claimed_with_the_mask() -> None:
    asked = ("causal-wide", "causal-bottom-right", "window", "segments")
    (subject,) = found(f"{__name__}:masked", "cpu")
    for name in asked:
        outcome = examine(subject, Check(replace(case(name), heads=3, kv_heads=None)))
        assert (outcome.verdict, outcome.reason) == (PASS, ""), name
    assert verdicts("drops_its_mask", "bshd", "causal-wide") == [WRONG]


def test_an_object_that_can_be_called() -> None:
    assert verdicts("INSTANCE", "bshd", "length-5") == [PASS]
