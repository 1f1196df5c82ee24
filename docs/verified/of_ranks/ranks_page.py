"""The page of ranks.py, and its arithmetic: from plain values alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ringtrue.audit.laws import Growth
from ringtrue.audit.rule import RULE

ONE = "one GPU"
Row = dict[str, Any]
DRAWS = """\
Random calls in bfloat16 (tests/parallel/draws.py), every rank's part judged as one whole against float64. uneven: of
those asked for, how many have ranks with unlike numbers of tokens; undivided: how many have heads that the Ulysses
degree does not divide; with other numbers: right with two other sets of them."""
RINGS = """\
Ring law: errors over real ranks beside those of fewer, the worst of six seeds (bfloat16, Gaussian, 512 tokens, 2 heads
of 64). The law is of 2 and of 16 ranks; 4 and 8 are held to what it allows 16."""
SPEED = """\
Forward and backward, bfloat16, ({0}, {1}, {2}, {3}), not causal: wall time between synchronisations of the device, the
longest of all ranks, medians, in turn in one run; none where ranks share a GPU. efficiency: one GPU's time, measured on
rank 0 while the others wait, over ranks x the time. extra and sent: of the rank with most; sent is counted in
ringtrue's communicator, and is not known of the others. off: the worst of out, dq, dk and dv against one GPU's call of
the same kernel, 2-norms. ringtrue's calls declare equal lengths, which the others take for granted; torch's context is
entered outside of the clock."""


def with_efficiency(rows: Sequence[Row], ranks: int) -> list[Row]:
    """Each row with the time of one GPU over (ranks x its own), where both were measured for the same tokens."""
    alone = {row["tokens"]: row["ms"] for row in rows if row["way"] == ONE and "ms" in row}
    return [
        {**row, "efficiency": alone[row["tokens"]] / (ranks * row["ms"])}
        if "ms" in row and row["way"] != ONE and row["tokens"] in alone
        else row
        for row in rows
    ]


def growths(rows: Sequence[Row]) -> Iterator[tuple[Row, Growth]]:
    """The ring law's verdicts: each row against one rank, and against two ranks where they ran.

    The law is of 2 and of 16 ranks; 4 and 8 are held to what it allows 16.
    """
    two = {row["backend"]: row["errors"] for row in rows if row["ranks"] == 2 and "errors" in row}
    for row in (row for row in rows if "errors" in row):
        law, ranks = RULE.ring[row["arithmetic"]], row["ranks"]
        limit = law.two_to_one if ranks == 2 else law.sixteen_to_one
        against = [(1, row["one"], limit)]
        if ranks > 2 and row["backend"] in two:
            against.append((2, two[row["backend"]], law.sixteen_to_two))
        for fewer, errors, most in against:
            for name in ("out", "dq", "dk", "dv"):
                ratio = max(a[name] / b[name] for a, b in zip(row["errors"], errors, strict=True))
                yield row, Growth(name, (ranks, fewer), ratio, most)


def page(name: str, found: dict[str, Any], picture: bool = False) -> str:
    """The readable half; with NAME.svg in it where there is one."""
    lines = [f"# {name}", "", f"`python docs/verified/ranks.py {name}`", ""]
    lines += [f"- {key}: {value}" for key, value in found["versions"].items()]
    lines += [f"- {ranks} ranks: {over}" for ranks, over in sorted(found.get("over", {}).items())]
    lines += [f"- not here: {', '.join(found['not_here'])}"] if found["not_here"] else []
    for make in (_draws, _rings, _demo, _speed):
        lines += ["", *make(found)]
    lines += ["", f"![efficiency over the number of GPUs]({name}.svg)"] if picture else []
    lines += ["", "Not here: FSDP2 beside context parallelism. This repository has no integration with it."]
    return "\n".join([*lines, ""])


def _table(head: str, rows: Sequence[Sequence[object]]) -> list[str]:
    names = head.split("|")
    lines = ["| " + " | ".join(name.strip() for name in names) + " |", "| -- " * len(names) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def _error(row: Row) -> str:
    return row.get("error", "")[:160].replace("|", "/").replace("\n", " ")


def _draws(found: dict[str, Any]) -> list[str]:
    rows = found.get("draws", [])
    if not rows:
        return ["Random calls: not run."]
    lines = [DRAWS]
    keys = ("right", "wrong", "refused", "by_chance", "uneven", "undivided")
    table = [[r["ranks"], r["backend"], r["mode"], *(r.get(k, "") for k in keys), _error(r)] for r in rows]
    head = "ranks|backend|mode|right|wrong|refused|with other numbers|uneven|undivided|error"
    told = [f"- {r['ranks']} ranks, {r['backend']}: {text[:400]}" for r in rows for text in r.get("told", [])]
    return [*lines, "", *_table(head, table), *([""] if told else []), *told]


def _rings(found: dict[str, Any]) -> list[str]:
    rows = found.get("rings", [])
    if not rows:
        return ["Ring law: not run."]
    lines = [RINGS]
    table = [
        [row["backend"], row["ranks"], g.ranks[1], g.quantity, f"{g.ratio:.3f}", g.limit, "yes" if g.ok else "NO"]
        for row, g in growths(rows)
    ]
    table += [[r["backend"], r["ranks"], "", _error(r), "", "", ""] for r in rows if "error" in r]
    return [*lines, "", *_table("backend|ranks|beside|of|ratio|limit|within", table)]


def _demo(found: dict[str, Any]) -> list[str]:
    rows = found.get("demo", [])
    if not rows:
        return ["Demo: not run."]
    table = []
    for row in rows:
        cells: list[object] = [row["ranks"], row["backend"], row.get("mode", "")]
        if "error" in row:
            table.append([*cells, _error(row), "", "", ""])
            continue
        figures = f"{float(row['gradient_error']):.2e}", f"{float(row['times_yardstick']):.2f}"
        off = max(map(float, row["loss_differences"]))
        table.append([*cells, *figures, f"{off:.1e}", "yes" if row["within"] else "NO"])
    head = "ranks|backend|mode|worst gradient error|x yardstick|loss off by|within"
    return ["`ringtrue demo --dtype bfloat16`:", "", *_table(head, table)]


def _speed(found: dict[str, Any]) -> list[str]:
    rows = found.get("speed", [])
    if not rows:
        return ["Speed: not run."]
    lines = [SPEED.format(*found["shape"])]
    if any("ms" in row for row in rows) and found["versions"]["device"] == "cpu":
        lines[0] += " On CPUs these times are of no worth: the ranks share them."
    table = []
    for row in sorted(rows, key=lambda r: (r["backend"], r["tokens"], r["ranks"])):
        cells: list[object] = [row["backend"], row["tokens"], row["ranks"], row["way"]]
        figures = [_number(row, "ms", ".2f"), _number(row, "efficiency", ".3f"), _number(row, "spread", ".3f")]
        figures += [_number(row, "extra_mb", ".0f"), _number(row, "sent_mb", ".1f"), _number(row, "difference", ".1e")]
        table.append([*cells, *figures, _error(row)])
    head = "backend|S|ranks|way|ms|efficiency|spread|extra MB|sent MB|off|error"
    return [*lines, "", *_table(head, table)]


def _number(row: Row, key: str, form: str) -> str:
    return f"{row[key]:{form}}" if key in row else ""
