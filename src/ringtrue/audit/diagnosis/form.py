"""What is wrong before any number is compared: missing, of another dtype or shape, NaN. In words, and set right."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..inputs import Inputs
from ..truth import Quantities, Truth, sum_to_bias

Like = tuple[torch.Size, torch.dtype]


@dataclass
class Form:
    """What was found, and the quantities as they would be without it; `known` is False where something has no name."""

    result: Quantities
    texts: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    known: bool = True


def form(inputs: Inputs, result: Quantities, right: Truth, expected: dict[str, Like]) -> Form:
    found = Form(result)
    _missing(found, expected)
    _dtypes(found, expected, inputs)
    _swapped(found, expected)
    for name, (shape, _) in expected.items():
        x = getattr(found.result, name)
        if x is not None and x.shape != shape:
            _shape(found, name, x, shape, inputs)
    _nan(found, expected, right)
    return found


def listed(names: list[str]) -> str:
    """a, b and c"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def verb(names: list[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many


def _missing(found: Form, expected: dict[str, Like]) -> None:
    names = [n for n in expected if getattr(found.result, n) is None]
    found.missing |= set(names)
    if names:
        found.texts.append(f"{listed(names)} {verb(names, 'is', 'are')} missing")


def _dtypes(found: Form, expected: dict[str, Like], inputs: Inputs) -> None:
    wrong: dict[torch.dtype, list[str]] = {}
    for name, (_, dtype) in expected.items():
        x = getattr(found.result, name)
        if x is not None and x.dtype != dtype:
            wrong.setdefault(x.dtype, []).append(name)
            found.result = found.result._replace(**{name: x.to(dtype)})
    for dtype, names in wrong.items():
        given = str(inputs.q.dtype).removeprefix("torch.")
        returned = verb(names, "is", "are")
        found.texts.append(
            f"{listed(names)} {returned} returned in {str(dtype).removeprefix('torch.')} for {given} inputs"
        )


def _swapped(found: Form, expected: dict[str, Like]) -> None:
    """dk and dv in each other's place, where their shapes tell."""
    dk, dv = found.result.dk, found.result.dv
    if dk is None or dv is None or not {"dk", "dv"} <= expected.keys():
        return
    wanted = expected["dk"][0], expected["dv"][0]
    if wanted[0] != wanted[1] and (dv.shape, dk.shape) == wanted:
        found.texts.append("dk and dv are in each other's place")
        found.result = found.result._replace(dk=dv, dv=dk)


def _shape(found: Form, name: str, x: Tensor, shape: torch.Size, inputs: Inputs) -> None:
    """Shapes that known faults give; the verdict on the numbers comes afterwards."""
    mask = inputs.mask
    full = torch.Size((inputs.q.shape[0], inputs.q.shape[2], inputs.q.shape[1], inputs.k.shape[1]))
    if name == "lse" and x.dim() == 3 and x.transpose(1, 2).shape == shape:
        text, x = "lse is laid out as (B, Sq, H)", x.transpose(1, 2)
    elif name == "lse" and x.dim() == 4 and x.squeeze(-1).shape == shape:
        text, x = "lse has a last dim of 1", x.squeeze(-1)
    elif name == "lse" and x.dim() == 3 and x.shape[:2] == shape[:2] and x.shape[2] > shape[2]:
        text, x = f"lse is padded from {shape[2]} to {x.shape[2]} queries", x[:, :, : shape[2]]
    elif name == "dbias" and x.shape == full:
        text, x = "dbias is not summed over the dims that the mask is broadcast along", sum_to_bias(x.double(), mask)
    elif x.dim() == 4 and x.transpose(1, 2).shape == shape and name != "dbias":
        text, x = f"{name} is laid out with heads before tokens", x.transpose(1, 2)
    elif name in ("dk", "dv") and x.shape == (*shape[:2], inputs.q.shape[2], shape[3]):
        text = f"{name} is not summed over the query heads of a group"
        x = x.unflatten(2, (shape[2], -1)).sum(3)
    else:
        found.known = False
        return
    found.texts.append(text)
    found.result = found.result._replace(**{name: x.to(getattr(found.result, name).dtype)})


def _nan(found: Form, expected: dict[str, Like], right: Truth) -> None:
    """NaN in all places, in rows that see nothing, or from some token on; the right numbers are put in its place."""
    lse = right.values.lse
    assert lse is not None
    blind = lse == -torch.inf
    places: dict[str, list[str]] = {}
    for name in expected:
        x, ref = getattr(found.result, name), getattr(right.values, name)
        if x is None or not bool(x.isnan().any()):
            continue
        nan = x.isnan()
        where = _where(name, nan, blind)
        if not where:
            found.known = False
            return
        places.setdefault(where, []).append(name)
        found.result = found.result._replace(**{name: torch.where(nan, ref.to(x.dtype), x)})
    for where, names in places.items():
        found.texts.append(f"{listed(names)} {verb(names, 'is', 'are')} NaN {where}")


def _where(name: str, nan: Tensor, blind: Tensor) -> str:
    if bool(nan.all()):
        return "in all places, as memory that nobody wrote, or one NaN summed into all"
    rows = {"out": blind.transpose(1, 2), "dq": blind.transpose(1, 2), "lse": blind}.get(name)
    if rows is not None:
        rows = rows if name == "lse" else rows.unsqueeze(-1)
        if bool(rows.any()) and torch.equal(nan, rows.expand_as(nan)):
            return "in the rows that see nothing, as 0 / 0 or -inf - -inf"
    if name == "dbias":
        return ""
    tokens = nan.movedim(2 if name == "lse" else 1, 0).flatten(1)
    whole = tokens.all(1)
    if bool((whole == tokens.any(1)).all()):
        first = int(whole.int().argmax())
        if bool(whole[first:].all()):
            return f"from token {first} on, as memory that nobody wrote"
        if bool((~whole[int((~whole).int().argmax()) :]).all()) and bool(whole[0]):
            return f"up to token {int((~whole).int().argmax()) - 1}, as memory that nobody wrote"
    return ""
