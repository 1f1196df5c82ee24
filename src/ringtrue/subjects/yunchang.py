"""yunchang (long-context-attention): Ulysses, rings and both, with each kernel that it can be told to take.

yunchang/ORDER/KERNEL     LongContextAttention(ring_impl_type=ORDER, attn_type=KERNEL)
yunchang/ulysses/KERNEL   UlyssesAttention(attn_type=KERNEL)
.../stand-in              written-out attention in the place of flash_attn's kernels, where flash_attn is not installed

Its README says that torch's kernels have no backward here; that is claimed of none of them.
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
from .ring_flash_attn import window

RELEASES = ("0.6.4",)  # those that somebody has looked at
PACKAGE = "yunchang"
HALVES = frozenset({"bfloat16", "float16"})
EVERY = frozenset({"ulysses", "ring", "both"})
TORCH_KERNELS = ("torch_math", "torch_flash", "torch_efficient", "torch_cudnn")
# by order: what of context parallelism it is for, and with which kernels; basic_pytorch takes torch's flash, whatever
# it is told
ORDERS = {
    "basic": (EVERY, ("fa", *TORCH_KERNELS)),
    "zigzag": (EVERY, ("fa",)),
    "strip": (EVERY, ("fa",)),
    "basic_pytorch": (EVERY, ("torch_flash",)),
    "ulysses": (frozenset({"ulysses"}), ("fa", *TORCH_KERNELS)),
}
FLASH = Says(HALVES, causal="square", gqa=True, dropout=True, softcap=True, window=True, deterministic=False)
TORCH = replace(FLASH, gqa=False, dropout=False, softcap=False, window=False, backward=False)
KERNELS = {
    "fa": FLASH,
    "torch_math": replace(TORCH, dtypes=HALVES | {"float32"}),
    "torch_flash": TORCH,
    "torch_efficient": replace(TORCH, dtypes=HALVES | {"float32"}),
    "torch_cudnn": TORCH,
}
CPU = ("fa", "torch_math")


def found(device: str) -> Iterator[Subject]:
    """Each order with each kernel; zigzag and strip call flash_attn's by name."""
    problem = unusable()
    about = f"yunchang {_version()}, torch {torch.__version__}"
    lacking = "flash_attn is not installed" if _flash_attn.missing() else ""
    for order, (ranks, kernels) in ORDERS.items():
        for kernel in kernels:
            name, says = f"yunchang/{order}/{kernel}", replace(KERNELS[kernel], ranks=ranks)
            absent = "" if device == "cuda" or kernel in CPU else f"torch has no such kernel for {device}"
            absent = lacking if kernel == "fa" else absent
            yield LongContext(name, order, kernel, says, about, problem or absent)
            if kernel == "fa" and lacking:
                told = f"{about}; {_flash_attn.ABOUT}"
                yield LongContext(f"{name}/stand-in", order, kernel, says, told, problem, stand_in=True)


def unusable() -> str:
    """Why no subject of this family can run; empty where they can, flash_attn apart."""
    version = _version()
    if not version:
        return "yunchang is not installed"
    if version not in RELEASES:
        return f"yunchang {version} is a release that nobody looked at; known are {', '.join(RELEASES)}"
    try:
        importlib.import_module(PACKAGE)
        if _flash_attn.missing():
            _flash_attn.imported(PACKAGE)
    except Exception as error:
        return f"yunchang {version} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


class LongContext(Plain):
    """One order of tokens with one kernel."""

    def __init__(
        self, name: str, order: str, kernel: str, says: Says, about: str, missing: str = "", *, stand_in: bool = False
    ) -> None:
        super().__init__(name, self.attend_call, says, about, None, missing)
        for key, value in {"order": order, "kernel": kernel, "stand_in": stand_in}.items():
            object.__setattr__(self, key, value)

    order: str
    kernel: str
    stand_in: bool

    def against(self, call: Call) -> str:
        reasons = {
            "one process": call.ranks.size == 1,
            "causal alone": self.order in ("zigzag", "strip") and call.mask.causal is None,
            "an lse": call.grad_lse is not None,
            "a ring of one over gloo, in which a rank sends to itself": self.order != "ulysses"
            and call.ranks.ring == 1
            and dist.is_initialized()
            and dist.get_backend() == "gloo",
        }
        return "; ".join(filter(None, [self.says.against(call), *(r for r, there in reasons.items() if there)]))

    def attend_call(self, call: Call) -> Tensor:
        raise NotImplementedError("it runs in several processes")

    def run(self, call: Call) -> Quantities:
        unsupported(call, "segments")
        if call.mask.causal not in (None, 0) or dense_kinds(call) or call.ranks.size == 1:
            raise NotImplementedError("there is no argument for a mask, for a causal offset, nor for one process")
        if self.order == "ulysses" and call.ranks.ring > 1:
            raise NotImplementedError("UlyssesAttention has no ring")
        equal_parts(call)
        library, ranks = self._library(), call.ranks
        rank, world = dist.get_rank(), dist.get_world_size()
        library.set_seq_parallel_pg(ranks.ulysses, ranks.ring, rank, world)
        module = self._module(library)
        places = tuple(self._places(library, call, x.shape[1]) for x in (call.query, call.key))
        seeded(call)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return module(
                query, key, value, dropout_p=call.dropout_p, softmax_scale=None if call.default_scale else call.scale,
                causal=call.mask.causal is not None, window_size=window(call), softcap=call.softcap,
            )  # fmt: skip

        return answered(call, (places[0], places[1]), attend)

    def _library(self) -> ModuleType:
        return _flash_attn.imported(PACKAGE) if self.stand_in else importlib.import_module(PACKAGE)

    def _module(self, library: ModuleType) -> torch.nn.Module:
        kernel = library.hybrid.attn_layer.AttnType(self.kernel)
        if self.order == "ulysses":
            return library.UlyssesAttention(library.globals.PROCESS_GROUP.ULYSSES_PG, attn_type=kernel)
        return library.LongContextAttention(ring_impl_type=self.order, attn_type=kernel)

    def _places(self, library: ModuleType, call: Call, length: int) -> Tensor:
        """Which tokens this rank has, by the library's own functions."""
        every = torch.arange(length, device=call.query.device)[None, :, None]
        cut = library.EXTRACT_FUNC_DICT["basic" if self.order == "ulysses" else self.order]
        rank, world, ranks = dist.get_rank(), dist.get_world_size(), call.ranks
        return cut(every, rank, world, rd=ranks.ring, ud=ranks.ulysses).flatten()
