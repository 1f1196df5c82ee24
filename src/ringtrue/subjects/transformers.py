"""transformers' attention functions, called as its models call them.

transformers/eager-llama, eager-gemma2    eager_attention_forward, which each model has of its own; two of them
transformers/NAME                         each that is registered in ALL_ATTENTION_FUNCTIONS
transformers/NAME/position_bias           a float mask in the argument of that name, where the function has one

A function gets (B, H, S, D) and a module with the attributes it reads, and gives (B, S, H, Dv). What hides goes the way
a model's own mask goes (masking_utils): key masks, causal, windows and segments become a bool mask for sdpa, a float
one of 0 and the dtype's lowest number for eager, a block mask for flex; causal alone is is_causal=True for sdpa. A
dense mask is somebody's own four-dimensional one, which models hand on as it is.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..audit.subject import Call, Plain, Says, Subject
from . import flex
from ._installed import why_not
from ._torch_calls import dense_kinds, heads_first, other_dtype, seeded, unsupported

LOOKED_AT = ("5.24", "5.24")
EVERY_MASK = frozenset({"bool", "float", "key_bool", "key_float"})
EAGER = Says(
    masks=EVERY_MASK - {"bool"},  # a bool tensor has no place in a sum of scores
    causal="any",
    window=True,
    segments=True,
    gqa=True,
    value_dim=True,
    head_dims=(1 << 30, 1),
    dropout=True,
    mask_grad=True,
)
SDPA = replace(EAGER, masks=EVERY_MASK, blind=True, deterministic=False)
FLASH = Says(
    frozenset({"bfloat16", "float16"}), causal="bottom_right", gqa=True, dropout=True, softcap=True, deterministic=False
)


@dataclass(frozen=True)
class Function:
    """One attention function: where it is, what it claims, and how a model's mask is built for it."""

    module: str
    name: str
    says: Says
    mask: Callable[[Call], Any]


def found(device: str) -> Iterator[Subject]:
    """The eager ones and what is registered; one subject that says why, where transformers cannot be audited."""
    missing = why_not("transformers", *LOOKED_AT)
    if missing:
        yield Plain("transformers", _nothing, about="transformers", missing=missing)
        return
    transformers = importlib.import_module("transformers")
    registered = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    about = f"transformers {transformers.__version__}, torch {torch.__version__}"
    known = functions(device)
    for name in [*(n for n in known if n.startswith("eager")), *sorted(registered)]:
        if name not in known:
            missing = (
                "it reads a cache of pages, not key and value" if name.startswith("paged") else "nobody looked at it"
            )
            yield Plain(f"transformers/{name.replace('|', '-')}", _nothing, about=about, missing=missing)
            continue
        yield Attention(name, known[name], about, unavailable(name, device))
        if name in ("sdpa", "flex_attention"):
            yield Attention(name, known[name], about, unavailable(name, device), by_position=True)


def functions(device: str) -> dict[str, Function]:
    """All that this module knows, by the name of the implementation."""
    models, integrations = "transformers.models", "transformers.integrations"
    on_cpu = device == "cpu"
    flexible = replace(flex.SAYS["cpu" if on_cpu else "cuda"]["compiled"], masks=EAGER.masks, lse=False, lse_grad=False)
    eager = "eager_attention_forward"
    return {
        "eager-llama": Function(f"{models}.llama.modeling_llama", eager, EAGER, eager_mask),
        "eager-gemma2": Function(f"{models}.gemma2.modeling_gemma2", eager, replace(EAGER, softcap=True), eager_mask),
        "sdpa": Function(f"{integrations}.sdpa_attention", "sdpa_attention_forward", SDPA, sdpa_mask),
        "flex_attention": Function(f"{integrations}.flex_attention", "flex_attention_forward", flexible, flex_mask),
        **{
            f"flash_attention_{n}": Function(
                f"{integrations}.flash_attention", "flash_attention_forward", replace(FLASH, dropout=n == 2), no_mask
            )
            for n in (2, 3, 4)
        },
    }


def unavailable(name: str, device: str) -> str:
    """Why the implementation cannot run here."""
    if name == "flex_attention":
        return flex.no_compiler(device)
    library = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(
        name, "flash_attn.cute"
    )
    if name.startswith("flash"):
        if device != "cuda":
            return "it runs on CUDA alone"
        try:
            there = find_spec(library) is not None
        except ModuleNotFoundError:
            there = False
        return "" if there else f"{library} is not installed"
    return ""


class Layer(nn.Module):
    """What attention functions read of the layer that calls them."""

    def __init__(self, implementation: str, group: int, head_dim: int) -> None:
        super().__init__()
        self.config = nn.Module()
        self.config._attn_implementation = implementation  # type: ignore[assignment]
        self.num_key_value_groups, self.head_dim, self.is_causal, self.layer_idx = group, head_dim, False, 0


class Attention(Plain):
    """One attention function."""

    def __init__(self, name: str, function: Function, about: str, missing: str, by_position: bool = False) -> None:
        # with a bias what is hidden gets the lowest number, and a row of these is an ordinary row
        says = replace(function.says, blind=False) if by_position and function.mask is sdpa_mask else function.says
        end = "/position_bias" if by_position else ""
        super().__init__(f"transformers/{name}{end}", self.attend_call, says, about, missing=missing, text=self.lines)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "implementation", name)
        object.__setattr__(self, "by_position", by_position)

    function: Function
    implementation: str
    by_position: bool

    def against(self, call: Call) -> str:
        own = "its own window of keys" if self.function.mask is no_mask and call.mask.since is not None else ""
        no_bias = "no float mask to put there" if self.by_position and call.mask.bias is None else ""
        return "; ".join(filter(None, (self.says.against(call), other_dtype(call), own, no_bias)))

    def attend_call(self, call: Call) -> Tensor:
        if not self.says.softcap:
            unsupported(call, "softcap")
        layer, words = Layer(self.implementation, call.group, call.query.shape[3]), self.words(call)
        rest = call if "position_bias" not in words else without_bias(call)
        mask = self.function.mask(rest)
        layer.is_causal = by_flag(self.function, rest)
        attend = getattr(importlib.import_module(self.function.module), self.function.name)
        seeded(call)
        with warnings.catch_warnings(), flex.every_kind_compiled():
            warnings.simplefilter("ignore")
            out, _ = attend(layer, *heads_first(call.query, call.key, call.value), mask, **words)
        return out

    def words(self, call: Call) -> dict[str, Any]:
        """The arguments by name: dropout and scaling as every model passes them, the others where they are asked."""
        words: dict[str, Any] = {"dropout": call.dropout_p, "scaling": call.scale}
        if call.softcap:
            words["softcap"] = call.softcap
        if self.by_position:
            if call.mask.bias is None:
                raise NotImplementedError("there is no float mask to put there")
            words["position_bias"] = position_bias(call)
        return words

    def lines(self, call: Call) -> str:
        function, words = self.function, {k: repr(v) for k, v in self.words(call).items() if k != "position_bias"}
        rest = call
        if self.by_position:
            words["position_bias"], rest = "position_bias", without_bias(call)
        shown = "".join(f", {name}={value}" for name, value in words.items())
        lines = [
            "import torch", f"from {function.module} import {function.name}", "module = torch.nn.Module()",
            f"module.num_key_value_groups, module.head_dim = {call.group}, {call.query.shape[3]}",
            f"module.is_causal = {by_flag(function, rest)}", *_mask_lines(function, rest, call, self.by_position),
            f"out, _ = {function.name}(module, *(x.transpose(1, 2) for x in (query, key, value)), mask{shown})",
        ]  # fmt: skip
        return "\n".join(lines)


def _nothing(call: Call) -> Tensor:
    raise NotImplementedError("it cannot be called")


def by_flag(function: Function, call: Call) -> bool:
    """Whether a model would leave causal to the function: sdpa and flash have a flag, and nothing else may hide."""
    mask, square = call.mask, call.query.shape[1] > 1
    if function.mask is no_mask:
        return mask.causal is not None
    alone = not dense_kinds(call) and mask.since is None and mask.q_segments is None
    return function.mask is sdpa_mask and mask.causal == 0 and alone and square


def without_bias(call: Call) -> Call:
    """The call without its float mask, which goes by another way."""
    mask = call.mask
    dense = mask.dense if mask.dense is not None and mask.dense.dtype == torch.bool else None
    return replace(call, mask=replace(mask, dense=dense, key_bias=None))


def position_bias(call: Call) -> Tensor:
    """The float mask in full, (B, H, Sq, Sk), as flex's score_mod reads it."""
    bias = call.mask.bias
    assert bias is not None
    return flex.expanded(bias if bias.dim() == 4 else bias[:, None, None, :], call)


# What a model's mask is for each kind of function


def sdpa_mask(call: Call) -> Tensor | None:
    """bool, or somebody's own; None where nothing but causal hides."""
    return None if by_flag(SDPA_FORM, call) else call.dense(places=True)


def eager_mask(call: Call) -> Tensor | None:
    """0 and the lowest number, or somebody's own as it is."""
    mask = call.dense(places=True)
    if mask is None or mask.dtype != torch.bool or call.mask.dense is not None:
        return mask
    zeros = torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(call.query.dtype).min)


def flex_mask(call: Call) -> Any:
    """A block mask, or somebody's own tensor in full size."""
    if not dense_kinds(call) or (call.mask.dense is None and call.mask.key_bias is None):
        return flex.block_mask(call)
    mask = call.dense(places=True)
    assert mask is not None
    heads = mask.shape[1]
    return mask.expand(call.query.shape[0], heads, call.query.shape[1], call.key.shape[1])


def no_mask(call: Call) -> None:
    """Flash takes none here: a mask of padding leaves its queries out, which is another call."""
    unsupported(call, "mask", "window")


SDPA_FORM = Function("", "", SDPA, sdpa_mask)


def _mask_lines(function: Function, rest: Call, call: Call, by_position: bool) -> list[str]:
    """Lines that make `mask` (and position_bias) of attn_mask or of the mask's parts."""
    lines = []
    if by_position:
        source = "dense" if call.mask.key_bias is None else "key_bias[:, None, None, :]"
        lines.append(f"position_bias = {source}.expand{tuple(flex.expanded_sizes(call))}")
    if by_flag(function, rest) or function.mask(rest) is None:
        return [*lines, "mask = None"]
    if function.mask is flex_mask and rest.mask.dense is None and rest.mask.key_bias is None:
        mods = flex.mod_lines(rest)
        return [*lines, "from torch.nn.attention.flex_attention import create_block_mask", *mods, "mask = block_mask"]
    if by_position:
        return [*lines, "mask = attn_mask > -torch.inf  # the bool part alone"]
    if function.mask is eager_mask and rest.mask.dense is None and rest.mask.key_bias is None:
        zeros = "torch.zeros_like(attn_mask, dtype=query.dtype)"
        return [f"mask = {zeros}.masked_fill(~attn_mask, torch.finfo(query.dtype).min)"]
    sizes = ", ".join(str(s) for s in function.mask(rest).shape)
    return ["mask = attn_mask" if function.mask is not flex_mask else f"mask = attn_mask.expand({sizes})"]
