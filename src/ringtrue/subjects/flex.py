"""torch.nn.attention.flex_attention: masks and biases as functions of the place, as its documentation writes them.

flex/eager       called as it is: the unfused path, which holds all scores
flex/compiled    torch.compile(flex_attention, dynamic=False): C++ on a CPU, Triton on CUDA. A compilation for every
                 kind and size of call: seconds each

What hides is a mask_mod (bool tensors, key masks, causal, windows, segments, joined by and_masks into one block mask);
what changes scores is a score_mod (softcap, then the float mask, a captured tensor: its gradient is flex's to give).
Claims are from the documentation and the refusals of 2.11 to 2.13. On a CPU there is no backward for query, key and
value, and the compiled path gives no lse there.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

from ..audit.subject import Call, Plain, Says, Subject
from ._torch_calls import given, heads_first, unsupported

Mod = Callable[..., Tensor]
DOCUMENTED = Says(
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    masks=frozenset({"bool", "float", "key_bool", "key_float"}),
    causal="any",
    window=True,
    segments=True,
    gqa=True,
    value_dim=True,
    softcap=True,
    lse=True,
    lse_grad=True,
    mask_grad=True,
    blind=True,
)
FORWARD = replace(DOCUMENTED, backward=False, lse_grad=False, mask_grad=False)
SAYS = {
    "cpu": {"eager": replace(FORWARD, dtypes=FORWARD.dtypes | {"float64"}), "compiled": replace(FORWARD, lse=False)},
    "cuda": {"eager": DOCUMENTED, "compiled": DOCUMENTED},
}


def found(device: str) -> Iterator[Subject]:
    """Both ways of calling it."""
    for way, says in SAYS.get(device, {}).items():
        yield Flex(way, says, f"torch {torch.__version__}", no_compiler(device) if way == "compiled" else "")


def no_compiler(device: str) -> str:
    """Why nothing can be compiled for the device here; empty where it can."""
    if device == "cuda":
        return "" if find_spec("triton") else "Triton is not installed"
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return "" if any(map(shutil.which, compilers)) else f"no C++ compiler: {' or '.join(compilers)}"


@lru_cache
def compiled() -> Any:
    """Compiled for every size anew: what is found then does not depend on the sizes of earlier calls."""
    return torch.compile(flex_attention, dynamic=False)


class Flex(Plain):
    """flex_attention, as it is or compiled."""

    def __init__(self, way: str, says: Says, about: str, missing: str) -> None:
        super().__init__(f"flex/{way}", self.attend_call, says, about, missing=missing, text=self.lines)

    def attend_call(self, call: Call) -> tuple[Tensor, Tensor | None]:
        unsupported(call, "dropout")
        attend: Any = compiled() if self.name == "flex/compiled" else flex_attention
        with warnings.catch_warnings(), every_kind_compiled():
            warnings.simplefilter("ignore")  # that the unfused path is slow
            result = attend(
                *heads_first(call.query, call.key, call.value), score_mod=score_mod(call), block_mask=block_mask(call),
                scale=None if call.default_scale else call.scale, enable_gqa=call.group > 1,
                return_aux=AuxRequest(lse=True) if self.says.lse else None,
            )  # fmt: skip
        out, lse = (result[0], result[1].lse) if self.says.lse else (result, None)
        return out.transpose(1, 2), lse

    def lines(self, call: Call) -> str:
        return "\n".join([*_imports(self, call), *mod_lines(call), *_attends(self, call)])


def every_kind_compiled() -> Any:
    """Without a limit past which torch.compile quietly runs a call uncompiled."""
    return torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)


def score_mod(call: Call) -> Mod | None:
    """What changes scores: softcap, then the float mask."""
    cap, dense, key_bias = call.softcap, call.mask.dense, call.mask.key_bias
    mods: list[Mod] = []
    if cap:
        mods.append(lambda score, b, h, i, j: cap * torch.tanh(score / cap))
    if dense is not None and dense.dtype != torch.bool:
        whole = expanded(dense, call)
        mods.append(lambda score, b, h, i, j: score + whole[b, h, i, j])
    if key_bias is not None:
        mods.append(lambda score, b, h, i, j: score + key_bias[b, j])
    if len(mods) < 2:
        return mods[0] if mods else None
    first, second = mods
    return lambda score, b, h, i, j: second(first(score, b, h, i, j), b, h, i, j)


def mask_mods(call: Call) -> list[Mod]:
    """What hides."""
    mask, dense, keep = call.mask, call.mask.dense, call.mask.key_keep
    until, since, q_ids, k_ids = mask.causal, mask.since, mask.q_segments, mask.k_segments
    mods: list[Mod] = []
    if dense is not None and dense.dtype == torch.bool:
        whole = expanded(dense, call)
        mods.append(lambda b, h, i, j: whole[b, h, i, j])
    if keep is not None:
        mods.append(lambda b, h, i, j: keep[b, j])
    if until is not None:
        mods.append(lambda b, h, i, j: j <= i + until)
    if since is not None:
        mods.append(lambda b, h, i, j: j >= i + since)
    if q_ids is not None and k_ids is not None:
        mods.append(lambda b, h, i, j: q_ids[b, i] == k_ids[b, j])
    return mods


def block_mask(call: Call) -> BlockMask | None:
    mods, sizes = mask_mods(call), expanded_sizes(call)
    if not mods:
        return None
    mod = mods[0] if len(mods) == 1 else and_masks(*mods)
    return create_block_mask(mod, *sizes, device=str(call.query.device))


def expanded(mask: Tensor, call: Call) -> Tensor:
    """A dense mask that has an entry for every place; broadcast ones by stride 0."""
    return mask.expand(expanded_sizes(call))


def expanded_sizes(call: Call) -> tuple[int, int, int, int]:
    return call.query.shape[0], call.query.shape[2], call.query.shape[1], call.key.shape[1]


# The lines of a bug report. They see the parts of the mask by their names in contract.Mask.


def _imports(subject: Flex, call: Call) -> list[str]:
    names = ["flex_attention"]
    names += ["AuxRequest"] if subject.says.lse else []
    names += ["create_block_mask"] if mask_mods(call) else []
    return ["import torch", f"from torch.nn.attention.flex_attention import {', '.join(names)}"]


def mod_lines(call: Call) -> list[str]:
    mask, dense = call.mask, call.mask.dense
    floats, bools = (dense is not None and (dense.dtype == torch.bool) == is_bool for is_bool in (False, True))
    changes = given(
        (
            (f"score = {call.softcap} * torch.tanh(score / {call.softcap})", bool(call.softcap)),
            ("score = score + whole[b, h, i, j]", floats),
            ("score = score + key_bias[b, j]", mask.key_bias is not None),
        ),
        "\n    ",
    )
    hides = given(
        (
            ("whole[b, h, i, j]", bools),
            ("key_keep[b, j]", mask.key_keep is not None),
            (f"(j <= i + {mask.causal})", mask.causal is not None),
            (f"(j >= i + {mask.since})", mask.since is not None),
            ("(q_segments[b, i] == k_segments[b, j])", mask.q_segments is not None),
        ),
        " & ",
    ).removeprefix(" & ")
    sizes = ", ".join(map(str, expanded_sizes(call)))
    lines = [] if dense is None else [f"whole = dense.expand({sizes})"]
    lines += [f"def score_mod(score, b, h, i, j):{changes}\n    return score"] if changes else []
    if hides:
        lines.append(f"def mask_mod(b, h, i, j):\n    return {hides}")
        lines.append(f'block_mask = create_block_mask(mask_mod, {sizes}, device="{call.query.device}")')
    return lines


def _attends(subject: Flex, call: Call) -> list[str]:
    arguments = given(
        (
            ("score_mod=score_mod", score_mod(call) is not None),
            ("block_mask=block_mask", bool(mask_mods(call))),
            (f"scale={call.scale!r}", not call.default_scale),
            ("enable_gqa=True", call.group > 1),
            ("return_aux=AuxRequest(lse=True)", subject.says.lse),
        )
    )
    attend = "torch.compile(flex_attention, dynamic=False)" if subject.name == "flex/compiled" else "flex_attention"
    found = f"{attend}(*(x.transpose(1, 2) for x in (query, key, value)){arguments})"
    if subject.says.lse:
        return [f"out, aux = {found}", "out, lse = out.transpose(1, 2), aux.lse"]
    return [f"out = {found}.transpose(1, 2)"]
