"""Snippets need torch and the subject alone, and print the very errors that the audit measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringtrue.audit.checks import Check, checks
from ringtrue.audit.examine import examine, found_by
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.order import named_orders
from ringtrue.audit.outcome import Outcome
from ringtrue.audit.snippet import snippet_of
from ringtrue.audit.subject import Call, Plain, Ranks, Says

MODULE = """
import torch

def right(query, key, value, attn_mask=None, is_causal=False, scale=None, dropout_p=0.0, forget=False):
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)))
    scores = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None or forget else scale)
    if forget:
        scores = scores * 1.1
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        bool_ = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if bool_ else scores + attn_mask
    weights = torch.dropout(scores.softmax(-1), dropout_p, dropout_p > 0).to(v.dtype)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)

def wrong(*args, **kwargs):
    return right(*args, **kwargs, forget=True)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return right(q, k, v)[0]
    @staticmethod
    def backward(ctx, g):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            dq, dk, dv = torch.autograd.grad(right(q, k, v)[0], (q, k, v), g)
        return dq, dv, dk

def swapped(query, key, value):
    return Twice.apply(query, key, value), None
"""
SAYS = Says(
    masks=frozenset({"bool", "float", "key_bool"}),
    causal="any",
    **dict.fromkeys(("gqa", "value_dim", "dropout", "lse", "lse_grad", "mask_grad"), True),
)
CHECKS = (
    *("call/causal/float32", "call/causal-float/float32", "call/bool-bqk/float32", "call/gqa/float32"),
    *("call/misaligned/float32", "call/expanded/float32", "call/dropout/float32", "call/heavy-tailed/bfloat16"),
    "call/float-of-input/bfloat16",
    "call/grad-lse/float32",
    "poison/length-33/float32",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with somebody's module in it."""
    path = tmp_path_factory.mktemp("home")
    (path / "somebody.py").write_text(MODULE)
    return path


def arguments(call: Call) -> dict[str, object]:
    given: dict[str, object] = {"is_causal": True} if call.mask.causal == 0 else {}
    dense = call.dense()
    given |= {} if dense is None else {"attn_mask": dense}
    given |= {} if call.default_scale else {"scale": call.scale}
    return given | ({"dropout_p": call.dropout_p} if call.dropout_p else {})


def subject(home: Path, name: str) -> Plain:
    module: dict[str, object] = {}
    exec(compile((home / "somebody.py").read_text(), "somebody.py", "exec"), module)
    plain = name == "swapped"

    def attend(call: Call) -> object:
        if call.rng is not None:
            torch.manual_seed(int(call.rng[0]))
        return module[name](call.query, call.key, call.value, **({} if plain else arguments(call)))

    def text(call: Call) -> str:
        given = {} if plain else arguments(call)
        shown = "".join(f", {n}={'attn_mask' if n == 'attn_mask' else repr(x)}" for n, x in given.items())
        ends = "out" if plain else "out, lse"
        return f"from somebody import {name}\n{ends} = {name}(query, key, value{shown}){'[0]' if plain else ''}"

    says = Says() if plain else SAYS
    return Plain(f"somebody/{name}", attend, says, text=text)


def check_of(name: str) -> Check:
    found = checks("full", dtypes=[name.rsplit("/", 1)[1]], only=name)
    assert len(found) == 1, name
    return found[0]


def script(subject: Plain, check: Check) -> tuple[Outcome, str]:
    outcome, found = found_by(subject, check, explain=False)
    assert found is not None, outcome
    return outcome, snippet_of(subject, check, found.inputs or build(check.case))


def run_all(home: Path, scripts: list[str]) -> list[str]:
    """What every script prints: one process, in which there is no ringtrue."""
    for i, text in enumerate(scripts):
        (home / f"script_{i}.py").write_text(text)
    runner = (
        "import runpy, sys, torch\nsys.path.insert(0, '.')\n"
        f"for i in range({len(scripts)}):\n"
        "    print(f'=== {i}')\n    runpy.run_path(f'script_{i}.py')\n"
        "    torch.use_deterministic_algorithms(False)\n"
        "assert not any(name.startswith(('ringtrue', 'jaxtyping')) for name in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", runner], cwd=home, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return re.split(r"=== \d+\n", done.stdout)[1:]


def printed(text: str) -> dict[str, tuple[str, float, float]]:
    rows = re.findall(r"^(\w+) +(ok|WRONG) +2-norm (\S+) .* max (\S+) ", text, re.MULTILINE)
    return {name: (word, float(norm), float(largest)) for name, word, norm, largest in rows}


def order_check(word: str) -> Check:
    name = next(n for n in named_orders(torch.float32) if word in n and n.endswith("second"))
    return Check(Case(name, 16, 16, heads=4, head_dim=64), "order")


Told = list[tuple[Outcome, str, str]]  # outcome, script, what it printed


@pytest.fixture(scope="module")
def told(home: Path) -> Told:
    """Every script of this file: those of CHECKS, of an order, and of lines that give gradients themselves."""
    asked = [("right", check) for check in CHECKS[::3]] + [("wrong", check) for check in CHECKS]
    made = [script(subject(home, name), check_of(check)) for name, check in asked]
    made.append(script(subject(home, "swapped"), check_of("call/length-33/float32")))
    made.append(script(subject(home, "wrong"), order_check("dense_float")))
    lines = "from somebody import right\nout, lse = right(query, key, value)\ndq, dk, dv = grad_out, 2 * key, value"
    by_hand = Plain("somebody/pair", subject(home, "right").attend, SAYS, text=lambda call: lines)
    made.append(script(by_hand, Check(Case("length-5", 5, 5))))
    prints = run_all(home, [text for _, text in made])
    return [(outcome, text, shown) for (outcome, text), shown in zip(made, prints, strict=True)]


def test_the_errors_are_those_of_the_audit(told: Told) -> None:
    wrong = set()
    for outcome, _, shown in told[:-2]:
        found = printed(shown)
        assert found.keys() == {v.quantity for v in outcome.quantities}, outcome
        for verdict in outcome.quantities:
            word, norm, largest = found[verdict.quantity]
            assert norm == pytest.approx(verdict.error_2, rel=2e-3, abs=1e-12), (outcome, verdict)
            assert largest == pytest.approx(verdict.error_inf, rel=2e-3, abs=1e-12), (outcome, verdict)
            assert (word == "ok") == verdict.ok, (outcome, verdict)
            wrong |= set() if verdict.ok else {(outcome.subject, verdict.quantity)}
        assert outcome.verdict == ("pass" if outcome.subject == "somebody/right" else "wrong"), outcome
    assert {q for name, q in wrong if name == "somebody/swapped"} == {"dk", "dv"}


def test_a_wrong_outcome_brings_its_script(home: Path) -> None:
    for name in ("call/length-5/float32", "poison/length-33/float32"):
        outcome = examine(subject(home, "wrong"), check_of(name))
        assert outcome.snippet.startswith(f'"""somebody/wrong on {name}: ')
    somebody = subject(home, "right")
    right = examine(somebody, check_of("call/length-5/float32"))
    assert (right.verdict, right.snippet) == ("pass", "")
    broken = Plain("somebody/broken", lambda call: 1 / 0, SAYS, text=somebody.text)
    outcome = examine(broken, check_of("call/length-5/float32"))
    assert outcome.verdict == "claimed but refused"
    assert "out, lse = right(query, key, value)" in outcome.snippet


def test_an_order_shows_every_call(told: Told) -> None:
    _, _, shown = told[-2]
    assert re.findall(r"call \d", shown) == ["call 1", "call 2", "call 3"]
    assert all("WRONG" in part for part in re.split(r"call \d", shown)[1:])


def test_gradients_that_the_lines_give_themselves(told: Told) -> None:
    _, text, shown = told[-1]
    assert text.count("torch.autograd.grad") == 1  # the reference's alone
    words = {name: word for name, (word, *_) in printed(shown).items()}
    assert words == {"out": "ok", "lse": "ok", "dq": "WRONG", "dk": "WRONG", "dv": "WRONG"}


def test_no_script_where_none_can_show_it(home: Path) -> None:
    somebody = subject(home, "right")
    case = Case("length-33", 33, 33)
    for check in (Check(case, "ranks", Ranks(2)), Check(case, "heads"), Check(case, "growth"), Check(case, "chunk")):
        assert snippet_of(somebody, check, build(case)) == ""
    for text in ("", "not python at all", "pair = somebody()"):
        silent = Plain("somebody/silent", somebody.attend, SAYS, text=lambda call, text=text: text)
        assert snippet_of(silent, Check(case), build(case)) == ""
    broken = Plain("somebody/broken", somebody.attend, SAYS, text=lambda call: str(1 / 0))
    assert snippet_of(broken, Check(case), build(case)) == ""
