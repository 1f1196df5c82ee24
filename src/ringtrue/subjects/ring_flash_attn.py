"""ring-flash-attn: its rings, over the whole default process group.

ring-flash-attn/ring     ring_flash_attn_func: contiguous parts
ring-flash-attn/zigzag   rank r has the chunks r and 2R-1-r of 2R; causal alone
ring-flash-attn/stripe   rank r has every R-th token from r; causal alone
ring-flash-attn/llama3   the samples of a batch packed to one sequence, cut into equal parts, keys gathered
.../stand-in             written-out attention in the place of flash_attn's kernels, where flash_attn is not installed

Dropout and windows are excluded by its README, under known limitations.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from ..audit.subject import Call, Plain, Quantities, Says, Subject
from . import _flash_attn
from ._ranks import answered, equal_parts
from ._torch_calls import dense_kinds, seeded, unsupported

RELEASES = ("0.1.8",)  # those that somebody has looked at
PACKAGE = "ring_flash_attn"
SAYS = Says(
    frozenset({"bfloat16", "float16"}), causal="square", gqa=True, lse=True, ranks=frozenset({"ring"}),
    deterministic=False,
)  # fmt: skip
FUNCTIONS = {
    "ring": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
    "llama3": "llama3_flash_attn_varlen_func",
}


def found(device: str) -> Iterator[Subject]:
    """Each ring; with a stand-in where there is no flash_attn."""
    problem = unusable()
    for order in FUNCTIONS:
        name, about = f"ring-flash-attn/{order}", f"ring-flash-attn {_version()}, torch {torch.__version__}"
        lacking = "flash_attn is not installed" if _flash_attn.missing() else ""
        yield Ring(name, order, about, problem or lacking)
        if lacking or problem:
            yield Ring(f"{name}/stand-in", order, f"{about}; {_flash_attn.ABOUT}", problem, stand_in=True)


def unusable() -> str:
    """Why no subject of this family can run; empty where they can, flash_attn apart."""
    version = _version()
    if not version:
        return "ring-flash-attn is not installed"
    if version not in RELEASES:
        return f"ring-flash-attn {version} is a release that nobody looked at; known are {', '.join(RELEASES)}"
    try:
        _library(_flash_attn.missing())
    except Exception as error:
        return f"ring-flash-attn {version} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _library(stand_in: bool) -> ModuleType:
    """The library; on the stand-in without its adapters for transformers, which 5.0 and later cannot satisfy."""
    if stand_in:
        return _flash_attn.imported(PACKAGE, (f"{PACKAGE}.adapters",))
    return importlib.import_module(PACKAGE)


def _version() -> str:
    try:
        return metadata.version("ring-flash-attn")
    except metadata.PackageNotFoundError:
        return ""


class Ring(Plain):
    """One order of tokens."""

    def __init__(self, name: str, order: str, about: str, missing: str = "", *, stand_in: bool = False) -> None:
        says = replace(SAYS, head_dims=(1 << 30, 1) if stand_in else (256, 8), lse=order != "llama3")
        super().__init__(name, self.attend_call, says, about, None, missing)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "stand_in", stand_in)

    order: str
    stand_in: bool

    def against(self, call: Call) -> str:
        reasons = {
            "one process": call.ranks.size == 1,
            "causal alone": self.order in ("zigzag", "stripe") and call.mask.causal is None,
            "another number of keys": self.order == "llama3" and call.query.shape[1] != call.key.shape[1],
            "a gradient of lse": call.grad_lse is not None,
        }
        return "; ".join(filter(None, [self.says.against(call), *(r for r, there in reasons.items() if there)]))

    def attend_call(self, call: Call) -> Tensor:
        raise NotImplementedError("it runs in several processes")

    def run(self, call: Call) -> Quantities:
        unsupported(call, "segments", "softcap")
        if call.mask.causal not in (None, 0) or dense_kinds(call) or call.ranks.ulysses > 1 or call.ranks.size == 1:
            raise NotImplementedError("there is no argument for a mask or a causal offset, nor anything but a ring")
        equal_parts(call)
        if self.order == "llama3":
            return self._packed(call)
        places = self._places(call, call.query.shape[1]), self._places(call, call.key.shape[1])
        seeded(call)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
            name = (
                f"{'' if self.order == 'ring' else self.order + '_'}{'ring_' * (self.order != 'stripe')}flash_attn_func"
            )
            out, lse, _ = getattr(_library(self.stand_in), name)(
                query, key, value, dropout_p=call.dropout_p, softmax_scale=None if call.default_scale else call.scale,
                causal=call.mask.causal is not None, window_size=window(call), return_attn_probs=True,
            )  # fmt: skip
            return out, lse

        return answered(call, places, attend)

    def _places(self, call: Call, length: int) -> Tensor:
        """Which tokens this rank has, as the library's own tests cut them."""
        rank, world = dist.get_rank(), dist.get_world_size()
        every = torch.arange(length, device=call.query.device)
        if self.order == "stripe":
            return every[rank::world]
        if self.order == "zigzag":
            chunks = every.chunk(2 * world)
            return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])
        return every.chunk(world)[rank]

    def _packed(self, call: Call) -> Quantities:
        """llama3: one packed sequence of all samples, whose lengths are told as cu_seqlens."""
        library, (batch, length) = _library(self.stand_in), call.query.shape[:2]
        if call.key.shape[1] != length:
            raise NotImplementedError("queries and keys are packed by the same lengths")
        ends = torch.arange(0, (batch + 1) * length, length, device=call.query.device, dtype=torch.int32)
        causal = call.mask.causal is not None
        told = library.llama3_flash_attn_prepare_cu_seqlens(ends, causal, dist.get_rank(), dist.get_world_size())
        packed = replace(
            call, **{n: getattr(call, n).flatten(0, 1)[None] for n in ("query", "key", "value", "grad_out")}
        )
        rows = torch.arange(batch * length, device=call.query.device).chunk(dist.get_world_size())[dist.get_rank()]
        seeded(call)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return library.llama3_flash_attn_varlen_func(
                query[0], key[0], value[0], *told[:4], heads_k_stride=1, local_k_slice=told[4],
                dropout_p=call.dropout_p, softmax_scale=None if call.default_scale else call.scale, causal=causal,
                window_size=window(call),
            )[None]  # fmt: skip

        found = answered(packed, (rows, rows), attend)
        return Quantities(*(None if x is None else x[0].unflatten(0, (batch, length)) for x in found))


def window(call: Call) -> tuple[int, int]:
    """As flash_attn has it: how many tokens to the left and to the right; -1 is no limit."""
    return (-1 if call.mask.since is None else -call.mask.since, -1)
