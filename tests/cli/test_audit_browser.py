"""The page in a real browser, network off: the matrix, the filters, a cell's details, its heat maps, and copying."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import reported
from browser import Browser, chromium
from ringtrue.audit.outcome import Outcome, Report
from ringtrue.cli.audit.page import to_html

SNIPPET = "import torch\n\nprint('<b>&amp; \"quotes\"')  # </script> …\n"
ROWS = "[...document.querySelectorAll('tr[data-check]')].filter(r => r.offsetParent).map(r => r.dataset.check)"
BAD = Report(tuple(replace(o, snippet=SNIPPET if o.bad else "") for o in reported.measured("call/length-*").outcomes))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not chromium():
        reason = "no chromium here (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must have one")
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.ask("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        yield browser


@pytest.fixture
def bad(page: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The page of a right and a wrong subject, freshly opened."""
    path = tmp_path / "report.html"
    path.write_text(to_html(BAD), "utf-8")
    page.open(path)
    yield page
    assert page.complaints() == []


def index_of(verdict: str) -> int:
    return next(i for i, o in enumerate(BAD.outcomes) if o.verdict == verdict)


def test_the_matrix_has_all_and_marks_by_word_and_colour(bad: Browser) -> None:
    assert len(bad.js(ROWS)) == len({o.check for o in BAD.outcomes})
    assert bad.js("document.querySelectorAll('#matrix td a').length") == len(BAD.outcomes)
    colours = {}
    for verdict in ("pass", "wrong"):
        cell = f"document.querySelector('#matrix a[href=\"#show={index_of(verdict)}\"]')"
        assert bad.js(f"{cell}.getAttribute('aria-label')") == verdict
        colours[verdict] = bad.js(f"getComputedStyle({cell}).backgroundColor")
    assert colours["pass"] != colours["wrong"]


def test_the_filter(bad: Browser) -> None:
    everything = bad.js(ROWS)
    bad.type("#find", "LENGTH-5 bfloat")
    assert bad.js(ROWS) == ["call/length-5/bfloat16"]
    assert bad.js("document.getElementById('found').textContent") == f"1 of {len(everything)} checks"
    bad.type("#find", "nothing like it")
    assert bad.js(ROWS) == []
    assert bad.js("document.getElementById('none').offsetParent !== null")
    bad.type("#find", " ")
    assert bad.js(ROWS) == everything
    bad.click("#onlybad")
    assert set(bad.js(ROWS)) == {o.check for o in BAD.outcomes if o.bad} < set(everything)
    bad.click("#onlybad")
    bad.click(".law button")
    assert bad.js(ROWS) == []
    bad.click(".law button")
    bad.click("input[data-verdict=pass]")
    assert bad.js("document.querySelectorAll('td.dim').length") == sum(o.verdict == "pass" for o in BAD.outcomes)


def test_a_click_shows_the_details(bad: Browser) -> None:
    index = index_of("wrong")
    outcome = BAD.outcomes[index]
    bad.click(f'#matrix a[href="#show={index}"]')
    bad.until(lambda: bad.js("document.querySelector('#details h2')?.textContent") == outcome.check)
    text = bad.js("document.getElementById('details').innerText")
    for verdict in outcome.quantities:
        assert f"{'✓' if verdict.ok else '✗'} {verdict.quantity}" in text
        assert f"{verdict.error_2:.2e}" in text
        assert f"{verdict.bound_inf:.2e}" in text
    assert outcome.replay in text
    assert bad.js("document.querySelector('a[aria-current]').getAttribute('href')") == f"#show={index}"
    assert bad.js("location.hash") == f"#show={index}"


def test_heat_maps_are_drawn(bad: Browser) -> None:
    index = index_of("wrong")
    outcome = BAD.outcomes[index]
    bad.click(f'#matrix a[href="#show={index}"]')
    bad.until(lambda: bad.js("document.querySelectorAll('figure').length") == len(outcome.maps))
    for heat in outcome.maps:
        rects = f"[...document.querySelectorAll('figure[data-map={heat.quantity}] rect')]"
        assert bad.js(f"{rects}.length") == len(heat.values) * len(heat.values[0])
        assert bad.js(f"{rects}.every(r => r.getBoundingClientRect().width > 1)")
        fills = bad.js(f"{rects}.map(r => getComputedStyle(r).fill)")
        shares = [share for row in heat.values for share in row]
        ranked = sorted(zip(shares, fills, strict=True))
        right = {fill for share, fill in ranked if share <= 1}
        assert len(right) <= 1
        assert ranked[-1][1] == "rgb(94, 0, 0)"  # the worst is the darkest
        assert ranked[0][1] != ranked[-1][1]
        assert not right & {fill for share, fill in ranked if share > 1}
        title = bad.js(f"{rects}[0].querySelector('title').textContent")
        assert title == f"head 0, position 0: {heat.values[0][0]:.15g} x"


def test_copying(bad: Browser) -> None:
    bad.click(f'#matrix a[href="#show={index_of("wrong")}"]')
    bad.until(lambda: bad.js("document.querySelectorAll('[data-copy]').length") == 2)
    assert bad.js("document.querySelector('pre[data-text=snippet]').textContent") == SNIPPET
    bad.click("[data-copy=snippet]")
    bad.until(lambda: bad.js("document.querySelector('[data-copy=snippet]').textContent") == "copied")
    assert bad.js("navigator.clipboard.readText()") == SNIPPET


def test_a_link_opens_a_cell_and_nasty_texts_do_nothing(page: Browser, tmp_path: Path) -> None:
    report = reported.composed()
    path = tmp_path / "nasty.html"
    path.write_text(to_html(report), "utf-8")
    page.open(path, "#show=1")
    assert page.js("document.querySelector('#details h2').textContent") == report.outcomes[1].check
    assert "alert(1)" in page.js("document.querySelector('#details .reason').textContent")
    assert page.js("document.querySelectorAll('script').length") == 2
    assert page.js("document.querySelectorAll('#details b, #details i:not(.ramp i)').length") == 1  # the map's own name
    assert page.js("document.querySelector('figure svg').getAttribute('aria-label')") == "dq: not finite somewhere"
    assert page.complaints() == []


def test_light_and_dark(bad: Browser) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        bad.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen[scheme] = bad.js(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
    bad.ask("Emulation.setEmulatedMedia", features=[])
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]


def test_hundreds_of_checks_by_tens_of_subjects(page: Browser, tmp_path: Path) -> None:
    outcomes = tuple(Outcome(f"s/{j}", f"call/case-{i}/float32", "pass") for i in range(300) for j in range(20))
    path = tmp_path / "large.html"
    path.write_text(to_html(Report(outcomes)), "utf-8")
    page.open(path)
    page.type("#find", "case-299")
    assert page.js(ROWS) == ["call/case-299/float32"]
    page.type("#find", " ")
    page.click('a[href="#show=5999"]')
    page.until(lambda: page.js("document.querySelector('#details h2')?.textContent") == "call/case-299/float32")
    # headings stay in sight, above and left of everything
    top, left = page.js("""(() => { const m = document.getElementById("matrix"), r = m.getBoundingClientRect();
        return [document.querySelector("thead th").getBoundingClientRect().top - r.top,
                document.querySelector("tr[data-check] th").getBoundingClientRect().left - r.left]; })()""")
    assert (round(top), round(left)) == (0, 0)
    assert page.js("document.getElementById('matrix').scrollTop") > 1000
