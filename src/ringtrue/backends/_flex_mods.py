"""A mask and options as the two functions that FlexAttention takes: of a score and its place, and of a place.

Everything that changes from call to call is a tensor that the functions are handed, the ends of a window too. The
functions themselves depend on a `Kind` alone, so that what is compiled for them serves all calls of that kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import Mask, Options

Mod = Callable[..., Tensor]


def ops() -> ModuleType:
    """torch's module of the two ops, which has the name of one of them."""
    return importlib.import_module("torch._higher_order_ops.flex_attention")


LAYERS = (
    "Functionalize", "Conjugate", "Negative", "ZeroTensor", "PythonTLSSnapshot", "PreDispatch", "FuncTorchBatched",
    "FuncTorchVmapMode", "FuncTorchGradWrapper", "FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode",
)  # fmt: skip


def all_layers() -> Any:
    """In it, calls go through every layer of dispatch again, of which vmap and tracing are made.

    The first run of a graph that torch.compile made is watched by torch, which leaves them out for an operator in it.
    """
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for name in LAYERS:
        left_out = left_out.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


class Kind(NamedTuple):
    """What the two functions depend on besides tensors. `full`: which dims of a dense mask are not 1."""

    dense: str = ""  # "bool", "float" or ""
    full: tuple[bool, ...] = ()
    key_keep: bool = False
    key_bias: bool = False
    segments: bool = False
    causal: bool = False
    since: bool = False
    softcap: float = 0.0

    @property
    def changes_scores(self) -> bool:
        return bool(self.dense == "float" or self.key_bias or self.softcap)


class Mods(NamedTuple):
    """The functions `score(score, b, h, i, j, *score_tensors)` and `mask(b, h, i, j, *mask_tensors)` of one call."""

    kind: Kind
    score: Mod
    back: Callable[..., list[Tensor | None]]
    mask: Mod
    score_tensors: tuple[Tensor, ...]
    mask_tensors: tuple[Tensor, ...]


def mods_of(mask: Mask, options: Options, device: torch.device) -> Mods:
    """The functions of a call and what they are handed."""
    dense, scores, places = mask.dense, list[Tensor](), list[Tensor]()
    is_bool = dense is not None and dense.dtype == torch.bool
    if dense is not None:
        for dim in (d for d in (3, 2, 1, 0) if dense.shape[d] == 1):
            dense = dense.squeeze(dim)
        (places if is_bool else scores).append(dense.detach())
    if mask.key_bias is not None:
        scores.append(mask.key_bias.detach())
    for part in (mask.key_keep, mask.q_segments, mask.k_segments):
        if part is not None:
            places.append(part)
    for end in (mask.causal, mask.since):
        if end is not None:
            places.append(torch.full((), end, dtype=torch.int32, device=device))
    kind = Kind(
        "" if mask.dense is None else "bool" if is_bool else "float",
        () if mask.dense is None else tuple(size > 1 for size in mask.dense.shape),
        mask.key_keep is not None, mask.key_bias is not None, mask.q_segments is not None,
        mask.causal is not None, mask.since is not None, options.softcap,
    )  # fmt: skip
    return Mods(kind, score_mod(kind), slope(kind), mask_mod(kind), tuple(scores), tuple(places))


@lru_cache(maxsize=256)
def score_mod(kind: Kind) -> Mod:
    """Softcap, then the float mask, in the accumulating dtype: a 16-bit score would round what is added to it."""

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        if not kind.changes_scores:
            return score
        given = iter(tensors)
        score = score if score.dtype == torch.float64 else score.float()
        if kind.softcap:
            score = kind.softcap * torch.tanh(score / kind.softcap)
        if kind.dense == "float":
            score = score + _dense(kind, next(given), b, h, i, j)
        return score + _at(next(given), b, j) if kind.key_bias else score

    return score


@lru_cache(maxsize=256)
def slope(kind: Kind) -> Callable[..., list[Tensor | None]]:
    """The score's backward: (score, b, h, i, j, gradient, *score_tensors) -> a gradient for each but `gradient`."""

    def back(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, grad: Tensor, *tensors: Tensor) -> Any:
        if kind.softcap:
            share = torch.tanh((score if score.dtype == torch.float64 else score.float()) / kind.softcap)
            grad = grad * (1.0 - share * share)
        return [grad, *(None,) * (4 + len(tensors))]

    return back


@lru_cache(maxsize=256)
def mask_mod(kind: Kind) -> Mod:
    """Whether a query may attend to a key, as far as that is no matter of adding -inf."""

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        seen = None
        for part in _parts(kind, b, h, i, j, iter(tensors)):
            seen = part if seen is None else seen & part
        return b.new_ones((), dtype=torch.bool) if seen is None else seen

    return mask


def _parts(kind: Kind, b: Tensor, h: Tensor, i: Tensor, j: Tensor, given: Iterator[Tensor]) -> Iterator[Tensor]:
    if kind.dense == "bool":
        yield _dense(kind, next(given), b, h, i, j)
    if kind.key_keep:
        yield _at(next(given), b, j)
    if kind.segments:
        yield _at(next(given), b, i) == _at(next(given), b, j)
    if kind.causal:
        yield j <= i + next(given)
    if kind.since:
        yield j >= i + next(given)


def _dense(kind: Kind, mask: Tensor, *place: Tensor) -> Tensor:
    """What a dense mask, its dims of 1 taken out, says of a place."""
    index = [x for x, full in zip(place, kind.full, strict=True) if full]
    return _at(mask, *index) if index else mask


def _at(x: Tensor, *index: Tensor) -> Tensor:
    """x[index] by the op itself: torch's way from brackets to it costs milliseconds where it is not compiled."""
    found: Tensor = torch.ops.aten.index.Tensor(x, list(index))
    return found
