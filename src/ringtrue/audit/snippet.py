"""A script that shows what a check found, for a bug report: it needs torch and the subject, and nothing of ringtrue.

It draws the same inputs from the same seed, stores them under the same strides, calls the subject by its own lines
(`Subject.source`) and compares every quantity with attention in float64, whose gradients are autograd's. The lines see
query, key, value, grad_out, grad_lse, the parts of the mask by their names in contract.Mask, and attn_mask: everything
that masks as one tensor; without causal, window and segments where the lines have an argument for those.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from textwrap import indent

from torch import Tensor

from ..contract import accumulate_dtype
from . import order
from .asked import call_of, revealed, within
from .checks import Check
from .inputs import Case, Inputs
from .maps import allowed
from .snippet_parts import COMPARE, DRAWN, POISON, STORED, mask_parts, masked, reference, sources
from .subject import Subject

SHOWN = ("call", "order", "poison")  # laws that a single script can show against a truth
GRADS = {"dq": "query", "dk": "key", "dv": "value", "dbias": "bias"}


def snippet_of(subject: Subject, check: Check, inputs: Inputs) -> str:
    """The script; empty where there is none: for calls of several processes, laws between calls, no lines to call."""
    if check.ranks.size > 1 or check.law not in SHOWN:
        return ""
    steps = [inputs]
    if check.law == "order":
        made = order.named_order(check.case.id, check.case.dtype, inputs.q.device, check.case.seed)
        steps = [_with_dropout(subject, within(subject.says, step.inputs)) for step in made]
    lines = [Lines(_source(subject, step)) for step in steps]
    if not all(found.whole for found in lines):
        return ""
    blocks = [_block(step, found, check) for step, found in zip(steps, lines, strict=True)]
    if len(blocks) > 1:
        blocks = [f'print("call {i}")\n{block}' for i, block in enumerate(blocks, 1)]
    imports = dict.fromkeys(["import torch", *(text for found in lines for text in found.imports)])
    shared = _shared(check, steps)
    head = [f'"""{subject.name} on {check.id}: errors against attention in float64."""', _imports(imports, shared)]
    return "\n\n".join([*head, *shared, *blocks]) + "\n"


def _source(subject: Subject, x: Inputs) -> str:
    try:
        return subject.source(call_of(x))
    except Exception:  # a stranger's subject: what was found is told without a script
        return ""


class Lines:
    """A subject's lines, taken apart: imports, the rest, and which of out, lse, dq, dk, dv, dbias they give."""

    def __init__(self, text: str) -> None:
        try:
            body = ast.parse(text).body
        except SyntaxError:  # what a stranger's subject gives may be words
            body = []
        rows = text.splitlines()
        taken = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
        gone = {i for n in taken for i in range(n.lineno - 1, n.end_lineno or n.lineno)}
        self.imports = [ast.unparse(n) for n in taken]
        self.rest = "\n".join(row for i, row in enumerate(rows) if i not in gone)
        nodes = [n for statement in body for n in ast.walk(statement)]
        self.gives = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.words = {n.arg for n in nodes if isinstance(n, ast.keyword) and n.arg}
        self.whole = "out" in self.gives

    @property
    def flags(self) -> bool:
        """Whether causal or a window is an argument of its own, so that the mask tensor does not hold it."""
        return any("causal" in word or "window" in word for word in self.words)


def _imports(imports: dict[str, None], shared: list[str]) -> str:
    text = "\n".join(shared)
    future = ["from __future__ import annotations\n"] if "Tensor" in text else []
    plain = ["import math"] if "math." in text else []
    return "\n".join([*future, *plain, *(["from typing import NamedTuple"] if "NamedTuple" in text else []), *imports])


def _shared(check: Check, steps: list[Inputs]) -> list[str]:
    """What all calls of the script have in common: helpers, and the numbers before they are stored."""
    helpers = [STORED] if any(_strided(x) for step in steps for x in _tensors(step).values()) else []
    helpers += [COMPARE]
    helpers += sources(check.case)
    poison = [POISON[steps[0].q.device.type]] if check.law == "poison" else []
    return [*helpers, *poison, _numbers(_drawn_case(check, steps[0]), steps[0])]


def _drawn_case(check: Check, inputs: Inputs) -> Case:
    """The case whose seed the numbers come from: an order draws from one of its own."""
    if check.law != "order":
        return check.case
    return order.base_case(check.case.id, check.case.dtype, check.case.seed)


def _numbers(case: Case, x: Inputs) -> str:
    shapes = ", ".join(str(tuple(t.shape)) for t in (x.q, x.k, x.v, x.grad_out))
    twice = "2 * " if case.values == "heavy" or case.mask or case.grad_lse else ""  # eight are drawn before the rest
    rows = [
        f'device, dtype = "{x.q.device.type}", {case.dtype}',
        f"draw = torch.Generator().manual_seed({case.numbers})",
        f"shapes = ({shapes})  # query, key, value, grad_out: (B, S, H, D)",
        f"numbers = [torch.randn(shape, generator=draw) for shape in {twice}shapes]",
    ]
    rows += [f"numbers = {case.values}(*numbers)"] if case.values != "gaussian" else []
    rows += ["numbers = [x.to(device, dtype) for x in numbers[:4]]"]
    if case.grad_lse:
        rows.append(
            f"grad_lse = torch.randn({tuple(x.grad_out.shape[i] for i in (0, 2, 1))}, generator=draw).to(device)"
        )
        rows += ["grad_lse = grad_lse.double()"] if str(case.dtype) == "torch.float64" else []
    return "\n".join([*rows, *mask_parts(case)])


def _block(x: Inputs, lines: Lines, check: Check) -> str:
    """One call: its tensors, the subject's lines, the reference and the comparison."""
    wanted = [name for name, asked in zip(GRADS, x.wanted, strict=True) if asked]
    by_hand = [name for name in wanted if name in lines.gives]
    rows = [f"query, key, value, grad_out = {_cast(x, check)}"]
    rows += [
        f"{name} = stored({name}, {tensor.stride()}, {tensor.storage_offset()})"
        for name, tensor in _tensors(x).items()
        if _strided(tensor)
    ]
    if not by_hand:
        rows += [f"{GRADS[name]}.requires_grad_()" for name in wanted if name != "dbias"]
    rows += masked(x, flags=lines.flags, own=check.law == "order")
    drawn = [DRAWN.format(p=x.options.dropout_p, mask=_passed(x))] if x.options.dropout_p else []
    parts = [_attend(x, lines, by_hand), reference(x, wanted), *drawn, _comparison(x, lines, wanted, by_hand)]
    return "\n\n".join(["\n".join(rows), *parts])


def _cast(x: Inputs, check: Check) -> str:
    return "numbers" if x.q.dtype == check.case.dtype else f"(x.to({x.q.dtype}) for x in numbers)"


def _attend(x: Inputs, lines: Lines, by_hand: list[str]) -> str:
    """The subject's lines as a function."""
    body = [f"torch.manual_seed({int(x.rng[0])})"] if x.rng is not None else []
    ends = ["out", "lse" if "lse" in lines.gives else "None", *by_hand]
    body += [lines.rest.strip("\n"), f"return {', '.join(ends)}"]
    return "def attend(query, key, value, attn_mask=None):\n" + indent("\n".join(body), "    ")


def _comparison(x: Inputs, lines: Lines, wanted: list[str], by_hand: list[str]) -> str:
    rows = [f"{', '.join(['out', 'lse', *by_hand])} = attend(query, key, value{_passed(x)})"]
    has_lse = "lse" in lines.gives and x.options.return_lse
    if wanted and not by_hand:
        joint = x.grad_lse is not None and has_lse
        outputs, upstream = ("(out, lse)", "(grad_out, grad_lse)") if joint else ("out", "grad_out")
        leaves = ", ".join(GRADS[name] for name in wanted)
        rows.append(f"grads = torch.autograd.grad({outputs}, [{leaves}], {upstream}, allow_unused=True)")
        rows.append(f"{', '.join(wanted)}{',' if len(wanted) == 1 else ''} = grads")
    bounds = allowed(x)
    rows.append("right = reference()")
    for name in ("out", *(["lse"] if has_lse else []), *wanted):
        norm, largest = (_number(bound) for bound in bounds[name])
        dtype = accumulate_dtype(x.q.dtype) if name == "lse" else x.q.dtype
        dtype = x.mask.bias.dtype if name == "dbias" and x.mask.bias is not None else dtype
        rows.append(f'compare("{name}", {name}, right["{name}"], {dtype}, {norm}, {largest})')
    return "\n".join(rows)


def _passed(x: Inputs) -> str:
    return "" if x.mask.hides_nothing else ", attn_mask"


def _with_dropout(subject: Subject, x: Inputs) -> Inputs:
    return replace(x, dropout=revealed(subject, x)) if x.options.dropout_p else x


def _tensors(x: Inputs) -> dict[str, Tensor]:
    return {"query": x.q, "key": x.k, "value": x.v, "grad_out": x.grad_out}


def _strided(x: Tensor) -> bool:
    return x.numel() > 0 and (x.stride() != x.new_empty(x.shape).stride() or x.storage_offset() > 0)


def _number(x: float) -> str:
    return f"{x:.4g}" if x - x == 0 else f'float("{x}")'
