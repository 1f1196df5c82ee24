"""`ringtrue explain`: the answer of `rt.explain` for a call that is only described; nothing runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("typer")

import torch
from typer.testing import CliRunner

import ringtrue as rt
from calls import HERE, backend_of, unreachable
from ringtrue import api, order, select
from ringtrue.cli.app import app

CPU = [b.name for b in HERE]


def explain(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, done.output


def data(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out = explain(*arguments, "--json")
    return code, json.loads(out)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of two: one that can next to nothing, one that can everything; neither may run."""
    poor = unreachable("poor", masks=frozenset(), causal="none", dropout=False, softcap=False, deterministic=False)
    found = (backend_of(poor), backend_of(unreachable("rich")))
    for module in (select, api):
        monkeypatch.setattr(module, "REGISTRY", found)
    monkeypatch.setattr(order, "ROWS", (order.Row("cpu", ("poor", "rich"), "docs/a-page.md", "a machine"),))


@pytest.mark.usefixtures("two")
def test_every_reason_of_every_backend() -> None:
    flags = "--mask key_padding --causal --dropout 0.1 --softcap 3 --deterministic --requires-grad q,k"
    code, found = data(*flags.split())
    assert (code, found["backend"], found["refused"], found["device"]) == (0, "rich", None, "cpu")
    assert [r["code"] for r in found["reasons"]["poor"]] == [
        "mask",
        "causal",
        "no-dropout",
        "no-softcap",
        "not-deterministic",
    ]
    assert found["reasons"]["rich"] == []
    code, out = explain(*flags.split())
    assert code == 0
    assert "would run: rich (asked for: auto)" in out
    source = "declared: docs/a-page.md, measured on a machine; tuned: switched off by RINGTRUE_TUNED"
    assert f"auto tries: poor, rich ({source})" in out
    assert (found["order"], found["order_from"]) == (["poor", "rich"], source)
    assert all(f"[{reason['code']}]" in out for reason in found["reasons"]["poor"])


def test_a_mask_in_a_dtype_of_its_own() -> None:
    code, found = data("--query", "2,6,4,8", "--mask", "float", "--mask-dtype", "float32")
    assert (code, found["backend"]) == (0, CPU[0])
    assert "q=bfloat16[2, 6, 4, 8]" in found["call"]
    assert "attn_mask=float32[6, 6]" in found["call"]


@pytest.mark.usefixtures("two")
def test_a_named_backend_that_cannot() -> None:
    code, out = explain("--causal", "--backend", "_poor")
    assert code == 1
    assert "would run: nothing (asked for: _poor)" in out
    assert "rich: could run too" in out


@pytest.mark.parametrize("kind", ["bool", "float", "key_padding", "key_bias", "segments", "window"])
def test_masks(kind: str) -> None:
    shapes = ["--query", "2,6,4,8", "--key", "2,5,4,8", "--value", "2,5,4,3"]
    code, found = data(*shapes, "--mask", kind, "--dtype", "float32")
    assert code == 0
    assert found["backend"] == CPU[0]
    said = {
        "bool": "attn_mask=bool[6, 5]",
        "float": "attn_mask=float32[6, 5]",
        "key_padding": "attn_mask=KeyPadding(bool[2, 5])",
        "key_bias": "attn_mask=KeyBias(float32[2, 5])",
        "segments": "attn_mask=Segments(int32[2, 6], int32[2, 5])",
        "window": "attn_mask=Window(left=1, right=1)",
    }
    assert said[kind] in found["call"]
    assert "v=float32[2, 5, 4, 3]" in found["call"]


def test_a_mask_of_another_shape_that_requires_grad() -> None:
    code, found = data("--query", "2,6,4,8", "--mask", "float", "--mask-shape", "2,1,1,6", "--requires-grad", "mask")
    q = torch.zeros(2, 6, 4, 8, dtype=torch.bfloat16)
    same = rt.explain(q, q, q, torch.zeros(2, 1, 1, 6, requires_grad=True))
    assert (code, found["backend"]) == (0, same.backend)
    assert {n: [r["code"] for r in why] for n, why in found["reasons"].items()} == {
        n: [r.code for r in why] for n, why in same.reasons.items()
    }


def test_the_layout_and_both_causal_corners() -> None:
    shapes = ["--layout", "bhsd", "--query", "1,4,6,8", "--key", "1,4,9,8", "--mask", "bottom_right", "--mask", "bool"]
    code, found = data(*shapes)
    assert code == 0
    assert "Causal(alignment='bottom_right') & bool[6, 9]" in found["call"]


def test_sizes_that_no_machine_here_could_hold() -> None:
    code, found = data("--query", "64,1000000,128,128", "--mask", "bool", "--requires-grad", "q,k,v")
    assert (code, found["backend"]) == (0, CPU[0])


@pytest.mark.parametrize("named", ["cuda", "cuda:1"])
def test_a_device_that_is_not_here(named: str) -> None:
    code, found = data("--device", named)
    device = "cuda"
    able = [s.name for s in rt.backends() if s.device == device and not found["reasons"][s.name]]
    assert (code, found["backend"]) == ((0, able[0]) if able else (1, None))
    for name in {s.name for s in rt.backends()} - {s.name for s in rt.backends() if s.device == device}:
        assert [r["code"] for r in found["reasons"][name]] == ["device"]


def test_what_is_refused_before_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise rt.UnsupportedError("not in this release")

    monkeypatch.setattr(rt, "explain", refuse)
    assert explain() == (1, "refused before anything is chosen: not in this release\n")
    assert data()[1]["refused"] == "not in this release"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--query 1,2,3", "has 3 sizes"),
        ("--query 1,2,x,4", "is not a shape"),
        ("--query 1,6,4,8 --key 1,6,4,9", "query and key differ in head dim"),
        ("--query 1,6,4,8 --key 1,6,2,8", "pass enable_gqa=True"),
        ("--mask float --mask-dtype int8", "float32, bfloat16, float16, float64"),
        ("--dtype int8", "float32, bfloat16, float16, float64"),
        ("--layout sbhd", "bshd, bhsd"),
        ("--mask padding", "bool, float, key_padding, key_bias"),
        ("--mask float --mask key_bias", "two float masks"),
        ("--mask bool --mask-shape 2,3", "attn_mask does not broadcast"),
        ("--mask key_bias --mask-shape 2,3", "belongs to --mask bool or float"),
        ("--requires-grad q,mask", "only a float or key_bias mask"),
        ("--mask bool --requires-grad mask", "only a float or key_bias mask"),
        ("--requires-grad x", "q, k, v, mask"),
        ("--dropout 1.5", "0 <= dropout_p < 1"),
        ("--backend nothing", "unknown backend"),
    ],
)
def test_bad_usage(arguments: str, said: str) -> None:
    code, out = explain(*arguments.split())
    assert code == 2
    assert said in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize("words", [("--device", "banana"), ("--mask", "bool", "--mask-dtype", "float32")])
def test_what_means_nothing_is_bad_usage(words: tuple[str, ...]) -> None:
    code, said = explain(*words)
    assert code == 2
    assert words[-2] in said


def test_without_a_backend_the_scope_and_the_environment_count() -> None:
    with rt.attention_backend("native_math"):
        assert "would run: native_math (asked for: native_math)" in explain()[1]
