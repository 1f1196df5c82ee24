"""Where a wrong quantity is off: its largest error as a share of what is allowed, per head and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import Inputs
from .judge import Verdict, judged, truth_of
from .outcome import HeatMap
from .truth import Quantities

COLUMNS = 64  # at most; longer sequences are cut into stretches


def maps_of(inputs: Inputs, result: Quantities | None, verdicts: Sequence[Verdict]) -> tuple[HeatMap, ...]:
    """One map for each wrong quantity that has a place to show: heads (rows) by positions (columns).

    Positions are those of the queries for out, lse and dq, of the keys for dk and dv; for dbias those of the queries
    where the mask has them, else of the keys, and one row where heads share it. A cell is the largest |x - ref| in it,
    over samples and channels, by the bound of the largest error: inf and NaN where the result is so and should not be.
    A quantity that is missing or of another shape has no map; nor has what a law without a truth found (result None).
    """
    wrong = [v.quantity for v in verdicts if not v.ok and v.quantity in Quantities._fields]
    if result is None or not wrong:
        return ()
    right = truth_of(inputs).values
    shown = [name for name in wrong if _same_shape(getattr(result, name), getattr(right, name))]
    bounds = allowed(inputs, right)
    return tuple(
        _map(name, getattr(result, name), getattr(right, name), bounds[name][1]) for name in shown if name in bounds
    )


def allowed(inputs: Inputs, right: Quantities | None = None) -> dict[str, tuple[float, float]]:
    """The bounds of the 2-norm and of the largest error of every quantity that the call asks for."""
    values = truth_of(inputs).values if right is None else right
    q, bias = inputs.q.dtype, inputs.mask.bias
    dtypes = {"lse": torch.promote_types(q, torch.float32), "dbias": q if bias is None else bias.dtype}
    exact = (None if x is None else x.to(dtypes.get(name, q)) for name, x in zip(values._fields, values, strict=True))
    return {v.quantity: (v.bound_2, v.bound_inf) for v in judged(Quantities(*exact), inputs)}


def _same_shape(x: Tensor | None, ref: Tensor | None) -> bool:
    return x is not None and ref is not None and x.shape == ref.shape and x.numel() > 0


def _map(name: str, x: Tensor, ref: Tensor, bound: float) -> HeatMap:
    error = torch.where(x.double() == ref, 0.0, (x.double() - ref).abs())
    cells = _by_head(name, error)
    stretch = -(-cells.shape[1] // COLUMNS)
    columns = torch.stack([part.amax(1) for part in cells.split(stretch, 1)], 1)
    rows = [[_share(error, bound) for error in row] for row in columns.tolist()]
    return HeatMap(name, tuple(map(tuple, rows)), stretch)


def _by_head(name: str, error: Tensor) -> Tensor:
    """The largest of each head and position: (heads, positions)."""
    if name == "lse":  # (B, H, S)
        return error.amax(0)
    if name == "dbias" and error.dim() == 2:  # (B, Sk), the same for all heads
        return error.amax(0, keepdim=True)
    if name == "dbias":  # (b, h, q, k)
        return error.amax((0, 3) if error.shape[2] > 1 else (0, 2))
    return error.amax((0, 3)).T  # (B, S, H, D)


def _share(error: float, bound: float) -> float:
    """Three digits are enough for a colour."""
    if error == 0:
        return 0.0
    return float(f"{error / bound:.3g}") if bound else float("inf")
