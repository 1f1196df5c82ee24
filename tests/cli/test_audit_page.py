"""The page as text: nothing from elsewhere, everything escaped, every verdict a word as well as a colour."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

import reported
import ringtrue as rt
from ringtrue.audit.examine import LAWS as JUDGED
from ringtrue.audit.outcome import VERDICTS, Outcome, Report
from ringtrue.audit.record import from_json
from ringtrue.cli.app import app
from ringtrue.cli.audit.page import LAWS, SIGNS, slug, to_html, unavailable


class Page(HTMLParser):
    """Elements with their attributes, texts, and the contents of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def details(text: str) -> list[dict[str, object]]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_it_needs_nothing_from_elsewhere() -> None:
    text = to_html(reported.measured())
    assert set(re.findall(r"\w+://[^\s\"'<)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|<link[^>]+stylesheet|<img|<iframe", text)
    assert "default-src 'none'" in text


def test_texts_of_strangers_stay_texts() -> None:
    report = reported.composed()
    text = to_html(report)
    page = Page(text)
    assert len(page.all("script")) == 2
    assert not page.all("i")
    assert "{{ 7 * 7 }}" in text
    assert "alert(1)</script>" not in text
    found = details(text)
    assert [d["reason"] for d in found] == [reported.NASTY] * len(report.outcomes)
    assert found[1]["snippet"] == report.outcomes[1].snippet


def test_a_cell_for_every_outcome() -> None:
    report = reported.composed()
    page = Page(to_html(report))
    cells = [a for a in page.all("a") if (a.get("href") or "").startswith("#show=")]
    labels = {int(a["href"].removeprefix("#show=")): a["aria-label"] for a in cells}
    assert labels == {i: o.verdict for i, o in enumerate(report.outcomes)}
    scopes = [a.get("scope") for a in page.all("th")]
    assert scopes.count("row") == len(VERDICTS)
    assert scopes.count("col") == 3


def test_every_verdict_has_a_sign_and_a_style_and_every_law_words() -> None:
    assert SIGNS.keys() == set(VERDICTS)
    assert len(set(SIGNS.values())) == len(VERDICTS)
    style = resources.files("ringtrue.cli.audit.page").joinpath("report.css").read_text("utf-8")
    assert [v for v in VERDICTS if f".{slug(v)} a" not in style] == []
    assert LAWS.keys() >= {law for law in JUDGED if not law.startswith("alone-")}  # a part of the order law


def test_numbers_and_maps_of_a_wrong_outcome() -> None:
    report = reported.measured()
    (found,) = [d for d in details(to_html(report)) if d["verdict"] == "wrong"]
    (outcome,) = [o for o in report.outcomes if o.bad]
    assert [q[0] for q in found["quantities"]] == [v.quantity for v in outcome.quantities]
    assert found["quantities"][1][2][0] == f"{outcome.quantities[1].error_2:.2e}"
    assert [m["name"] for m in found["maps"]] == [m.quantity for m in outcome.maps] == ["out", "dq", "dk", "dv"]
    assert found["maps"][1]["values"] == [list(row) for row in outcome.maps[1].values]


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (("pass",), "✓ right: all 1 checks that ran"),
        (("pass", "crash"), "✗ wrong: 1 of 2 checks that ran"),
        (("not run",), "· nothing ran"),
        ((), "· nothing ran"),
    ],
)
def test_the_headline(verdicts: tuple[str, ...], words: str) -> None:
    outcomes = tuple(Outcome("s", f"call/{i}/float32", verdict) for i, verdict in enumerate(verdicts))
    assert words in to_html(Report(outcomes))


def test_without_jinja2_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable() == ""
    rt.optional.why_not.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'ringtrue[report]'" in unavailable()
    done = CliRunner().invoke(app, ["audit", "ours", "--html", "page.html"], env={"COLUMNS": "200"})
    assert done.exit_code == 2  # before anything runs
    assert "jinja2" in done.output
    rt.optional.why_not.cache_clear()


def test_the_sample_is_what_the_page_makes_of_it() -> None:
    folder = Path(__file__).parents[2] / "docs" / "audit"
    report = from_json((folder / "sample.json").read_text("utf-8"))
    assert {o.subject for o in report.outcomes if o.bad} == {"attentions:transposed_twice"}
    made = to_html(report) == (folder / "sample.html").read_text("utf-8")
    assert made, "python docs/audit/sample.py remakes it"
    assert (folder / "sample.png").stat().st_size < 200_000
