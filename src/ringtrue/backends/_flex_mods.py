"""A mask and options as the two functions that FlexAttention takes: of a score and its place, and of a place.

Everything that changes from call to call is a tensor that the functions are handed, the ends of a window too. The
functions themselves depend on a `Kind` alone, so that what is compiled for them serves all calls of that kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import Mask, Options

Mod = Callable[..., Tensor]
NEVER = 1 << 30  # an end of a window beyond all keys
HIDDEN = -(1 << 63)  # the segment of keys that nobody sees, where no other can be called so


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
        if hasattr(torch._C.DispatchKey, name):
            left_out = left_out.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


class Kind(NamedTuple):
    """What the two functions depend on besides tensors: few, for each is compiled for seconds.

    Hidden keys are a segment of their own, and a causal limit is a window without a beginning."""

    dense: str = ""  # "bool", "float" or ""
    key_bias: bool = False
    segments: bool = False
    ends: bool = False
    softcap: float = 0.0
    score_mod: Mod | None = None  # the caller's, and how many tensors it captures
    score_captured: int = 0
    mask_mod: Mod | None = None
    mask_captured: int = 0

    @property
    def changes_scores(self) -> bool:
        return bool(self.dense == "float" or self.key_bias or self.softcap or self.score_mod)


class Mods(NamedTuple):
    """The functions `score(score, b, h, i, j, *score_tensors)` and `mask(b, h, i, j, *mask_tensors)` of one call."""

    kind: Kind
    score: Mod
    back: Callable[..., list[Tensor | None]]
    mask: Mod
    score_tensors: tuple[Tensor, ...]
    mask_tensors: tuple[Tensor, ...]


def mods_of(mask: Mask, options: Options, q: Tensor) -> Mods:
    """The functions of a call and what they are handed."""
    dense, scores, places, device, q_len = mask.dense, list[Tensor](), list[Tensor](), q.device, q.shape[1]
    is_bool = dense is not None and dense.dtype == torch.bool
    own: dict[str, Any] = dict(options.extra)
    score_own, mask_own = own.get("score_mod"), own.get("mask_mod")
    score_captured, mask_captured = captured(score_own), captured(mask_own)
    if dense is not None:
        (places if is_bool else scores).extend(_flat(dense))
    if mask.key_bias is not None:
        scores.append(mask.key_bias.detach().contiguous())
    segments, ends = mask.q_segments is not None or mask.key_keep is not None, (mask.causal, mask.since) != (None, None)
    if segments:
        places.extend(_segments(mask, q_len))
    if ends:
        causal, since = NEVER if mask.causal is None else mask.causal, -NEVER if mask.since is None else mask.since
        places.extend(torch.full((), end, dtype=torch.int32, device=device) for end in (causal, since))
    kind = Kind(
        "" if mask.dense is None else "bool" if is_bool else "float",
        mask.key_bias is not None, segments, ends, options.softcap,
        score_own, len(score_captured), mask_own, len(mask_captured),
    )  # fmt: skip
    if score_own is not None:
        trace(kind, score_own, score_captured, device)
    given = (*score_captured, *scores), (*mask_captured, *places)
    return Mods(kind, score_mod(kind), slope(kind), mask_mod(kind), *given)


def _flat(mask: Tensor) -> tuple[Tensor, ...]:
    """The elements of a dense mask, and how far each of its dims is from one to the next; 0 along a dim of 1."""
    mask = mask.detach().contiguous()
    steps = (0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True))
    return mask.view(-1), *(torch.full((), step, dtype=torch.int64, device=mask.device) for step in steps)


def _segments(mask: Mask, q_len: int) -> tuple[Tensor, Tensor]:
    """Segments (B, Sq) and (B, Sk), of which no query has that of the hidden keys."""
    if mask.q_segments is None or mask.k_segments is None:
        keep = mask.key_keep
        assert keep is not None
        return torch.zeros(keep.shape[0], q_len, dtype=torch.int64, device=keep.device), keep.long() - 1
    q_ids, k_ids = (x.long() for x in (mask.q_segments, mask.k_segments))
    if mask.key_keep is not None:
        hidden = k_ids.new_full((), HIDDEN) if mask.q_segments.dtype != torch.int64 else _unused(q_ids)
        k_ids = torch.where(mask.key_keep, k_ids, hidden)
    return q_ids.contiguous(), k_ids.contiguous()


def _unused(ids: Tensor) -> Tensor:
    """(B, S) -> (B, 1): of the S + 1 numbers from 0 on, one that no id of the sample is."""
    most = ids.shape[1]
    taken = ids.new_zeros(ids.shape[0], most + 2, dtype=torch.uint8)
    taken = taken.scatter(1, torch.where((ids >= 0) & (ids <= most), ids, most + 1), 1)
    return taken[:, : most + 1].argmin(1, keepdim=True)


@lru_cache(maxsize=256)
def score_mod(kind: Kind) -> Mod:
    """Softcap, the caller's own change, then the float mask; in float32, for 16 bits would round what is added."""

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        if not kind.changes_scores:
            return score
        given = iter(tensors)
        score = score if score.dtype == torch.float64 else score.float()
        if kind.softcap:
            score = kind.softcap * torch.tanh(score / kind.softcap)
        if kind.score_mod is not None:
            score = bound(kind.score_mod, _next(given, kind.score_captured))(score, b, h, i, j)
        if kind.dense == "float":
            score = score + _dense(_next(given, 5), b, h, i, j)
        return score + _at(next(given), b, j) if kind.key_bias else score

    return score


@lru_cache(maxsize=256)
def slope(kind: Kind) -> Callable[..., list[Tensor | None]]:
    """The score's backward: (score, b, h, i, j, gradient, *score_tensors) -> a gradient for each but `gradient`."""

    def back(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, grad: Tensor, *tensors: Tensor) -> Any:
        share, wide = None, score if score.dtype == torch.float64 else score.float()
        if kind.softcap:
            share = torch.tanh(wide / kind.softcap)
            wide = kind.softcap * share
        if kind.score_mod is not None:
            grad = _TRACED[kind](wide, b, h, i, j, grad, *tensors[: kind.score_captured])[0]
        if share is not None:
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
    if kind.mask_mod is not None:
        yield bound(kind.mask_mod, _next(given, kind.mask_captured))(b, h, i, j)
    if kind.dense == "bool":
        yield _dense(_next(given, 5), b, h, i, j)
    if kind.segments:
        yield _at(next(given), b, i) == _at(next(given), b, j)
    if kind.ends:
        yield j <= i + next(given)
        yield j >= i + next(given)


def _dense(given: list[Tensor], *place: Tensor) -> Tensor:
    """What a dense mask, as `_flat` gives it, says of a place."""
    mask, *steps = given
    where = [x.long() * step for x, step in zip(place, steps, strict=True)]
    return _at(mask, where[0] + where[1] + where[2] + where[3])


def _at(x: Tensor, *index: Tensor) -> Tensor:
    """x[index] by the op itself: torch's way from brackets to it costs milliseconds where it is not compiled."""
    found: Tensor = torch.ops.aten.index.Tensor(x, list(index))
    return found


def _next(given: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(given) for _ in range(count)]


# ---- functions of the caller -----------------------------------------------------------------------------------------

_TRACED: dict[Kind, Any] = {}


def trace(kind: Kind, function: Mod, tensors: list[Tensor], device: torch.device) -> None:
    """The derivative of a caller's score_mod, (score, b, h, i, j, gradient, *tensors) -> gradients, as torch traces it.

    Kept as long as what is compiled of it: it depends on nothing but the function."""
    if kind in _TRACED:
        return
    by_index: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    score = torch.zeros((), device=device, requires_grad=True)
    place = tuple(torch.zeros((), dtype=torch.int32, device=device) for _ in range(4))

    def whole(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *given: Tensor) -> Tensor:
        return bound(function, list(given))(score, b, h, i, j)

    with torch.enable_grad(), all_layers(), by_index.TransformGetItemToIndex():
        _TRACED[kind] = ops().create_fw_bw_graph(whole, (score, *place), tuple(tensors))[1]


def captured(function: Mod | None) -> list[Tensor]:
    """The tensors in a function's closure and among the globals it names, as they are now."""
    if not isinstance(function, FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    named = [function.__globals__[name] for name in _globals(function)]
    return [x.detach() for x in (*cells, *named) if isinstance(x, Tensor)]


def _globals(function: FunctionType) -> list[str]:
    return [n for n in function.__code__.co_names if isinstance(function.__globals__.get(n), Tensor)]


def bound(function: Mod, tensors: list[Tensor]) -> Mod:
    """The function with other tensors in their places: compiled code is handed tensors, it does not keep them."""
    if not tensors or not isinstance(function, FunctionType):
        return function
    given = iter(tensors)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    closure = tuple(CellType(next(given) if isinstance(x, Tensor) else x) for x in cells)
    names = {**function.__globals__, **dict(zip(_globals(function), given, strict=True))}
    found = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    return found
