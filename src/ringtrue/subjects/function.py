"""Anybody's callable, by its name "package.module:function": it is called with what its signature has names for.

    bshd    fn(query (B, Sq, H, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv), ...) -> out (B, Sq, H, Dv)
    bhsd    the same with heads before tokens, as torch's own attention
    packed  fn(qkv (B, S, 3, H, D), ...) -> out (B, S, H, D)

A function that is asked for lse gives (out, lse (B, H, Sq)). Arguments that a call does not need are not passed, so
that the function's own defaults are audited too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import ringtrue as rt

from ..audit.subject import Call, Plain, Says

LAYOUTS = ("bshd", "bhsd", "packed")
# the names in use for one thing; the first that a signature has is taken
NAMES: dict[str, tuple[str, ...]] = {
    "mask": ("attn_mask", "attention_mask", "mask", "attn_bias", "bias"),
    "causal": ("is_causal", "causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "dropout": ("dropout_p", "dropout"),
    "gqa": ("enable_gqa",),
    "softcap": ("softcap", "logits_soft_cap"),
    "window": ("window_size", "window"),
    "lse": ("return_lse", "return_softmax_lse"),
}


def function(name: str, layout: str = "bshd", says: Says | None = None) -> Function:
    """The subject of that name. ValueError where there is no such module, function or layout.

    says  what it claims; without it, what its signature has names for (`says_of`)
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}: {layout!r}")
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported, a syntax error too
        raise ValueError(f"cannot import {module!r}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, not a function")
    taken = words_of(found)
    claimed = says or says_of(taken, layout)
    about = f"{name}, layout {layout}; claims {'given' if says else 'read from its signature'}"
    if reason := _cannot_be_called(found, layout):
        raise ValueError(f"{name} {reason}")
    return Function(
        name,
        lambda call: _answer(found, taken, layout, claimed, call),
        claimed,
        about,
        text=lambda call: _lines(module, attribute, taken, layout, claimed, call),
        words=taken,
    )


@dataclass(frozen=True)
class Function(Plain):
    """A callable. What reaches it inside of its mask, causal or window, is claimed with the mask."""

    words: Mapping[str, str] = field(default_factory=dict)

    def against(self, call: Call) -> str:
        if in_mask(self.words, self.says, call) and "mask" in self.words:
            call = replace(call, mask=rt.Mask(dense=call.dense(places=True)))
        return self.says.against(call)


def _cannot_be_called(fn: Any, layout: str) -> str:
    """Why a call of query, key and value (of one packed tensor) is none of this; empty where it may be."""
    if inspect.isclass(fn):
        return "is a class: name a function, or an object of it that can be called"
    wanted = 1 if layout == "packed" else 3
    try:
        inspect.signature(fn).bind(*range(wanted))
    except ValueError:  # a builtin: it says nothing of itself
        return ""
    except TypeError as error:
        other = "is it --layout packed?" if layout != "packed" else "is it --layout bshd?"
        return f"cannot be called with {wanted} tensors and nothing else ({error}); {other}"
    return ""


def words_of(fn: Callable[..., Any]) -> dict[str, str]:
    """Which of NAMES the function has parameters for: our word -> its name. **kwargs takes torch's names."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin: it says nothing of itself
        return {word: names[0] for word, names in NAMES.items() if word != "lse"}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    found = {word: next((n for n in names if n in parameters), "") for word, names in NAMES.items()}
    return {word: name or NAMES[word][0] for word, name in found.items() if name or (anything and word != "lse")}


def says_of(words: Mapping[str, str], layout: str) -> Says:
    """What a signature claims: what it takes an argument for, it must honour."""
    return Says(
        masks=frozenset({"bool", "float", "key_bool", "key_float"} if "mask" in words else ()),
        causal="top_left" if "causal" in words else "none",
        window="window" in words,
        gqa="gqa" in words,
        cross=layout != "packed",
        scale="scale" in words,
        dropout="dropout" in words,
        softcap="softcap" in words,
        lse="lse" in words,
    )


def _flag(words: Mapping[str, str], says: Says, call: Call) -> bool:
    """Whether the function's own causal flag stands for this call's offset."""
    meant = call.key.shape[1] - call.query.shape[1] if says.causal == "bottom_right" else 0
    return call.mask.since is None and call.mask.causal == meant and "causal" in words


def in_mask(words: Mapping[str, str], says: Says, call: Call) -> bool:
    """Whether causal, window or segments can be passed only as a part of the mask."""
    mask = call.mask
    window = mask.since is not None and "window" in words
    places = mask.causal is not None or mask.since is not None
    return mask.q_segments is not None or (places and not window and not _flag(words, says, call))


def arguments(words: Mapping[str, str], says: Says, call: Call) -> dict[str, Any]:
    """What this call needs beside its tensors. TypeError, a refusal, where the function has no name for it."""
    mask = call.mask
    needed: dict[str, Any] = {}
    if _flag(words, says, call):
        needed["causal"] = True
    elif mask.since is not None and "window" in words:
        needed["window"] = (-mask.since, -1 if mask.causal is None else mask.causal)
    dense = call.dense(places=in_mask(words, says, call))
    if dense is not None:
        needed["mask"] = dense
    needed |= {"scale": call.scale} if not call.default_scale else {}
    needed |= {"dropout": call.dropout_p} if call.dropout_p else {}
    needed |= {"softcap": call.softcap} if call.softcap else {}
    needed |= {"gqa": True} if call.group > 1 and "gqa" in words else {}
    needed |= {"lse": True} if says.lse else {}
    missing = [word for word in needed if word not in words]
    if missing:
        raise TypeError(f"it has no parameter for: {', '.join(missing)}")
    return {words[word]: value for word, value in needed.items()}


def _answer(fn: Any, words: Mapping[str, str], layout: str, says: Says, call: Call) -> Any:
    given = arguments(words, says, call)
    if call.rng is not None:
        torch.manual_seed(int(call.rng[0]))
    tensors = (call.query, call.key, call.value)
    if layout == "packed":
        if len({x.shape for x in tensors}) != 1:
            raise TypeError("packed takes query, key and value of one shape")
        tensors = (torch.stack(tensors, 2),)  # type: ignore[assignment]
    elif layout == "bhsd":
        tensors = tuple(x.transpose(1, 2) for x in tensors)  # type: ignore[assignment]
    result = fn(*tensors, **given)
    out, lse = result if isinstance(result, tuple) else (result, None)
    return (_back(out, layout), lse) if says.lse else _back(out, layout)


def _back(out: Tensor, layout: str) -> Tensor:
    return out.transpose(1, 2) if layout == "bhsd" else out


def _lines(module: str, attribute: str, words: Mapping[str, str], layout: str, says: Says, call: Call) -> str:
    """The call as Python, from query, key, value (B, S, H, D) and attn_mask."""
    try:
        given = arguments(words, says, call)
    except TypeError as error:
        return f"# refused: {error}"
    shown = [f"{n}={'attn_mask' if isinstance(v, Tensor) else repr(v)}" for n, v in given.items()]
    inputs = {
        "bshd": "query, key, value",
        "bhsd": "*(x.transpose(1, 2) for x in (query, key, value))",
        "packed": "torch.stack((query, key, value), 2)",
    }[layout]
    lines = [f"from {module} import {attribute.partition('.')[0]}"]
    if isinstance(given.get(words.get("mask", "")), Tensor) and (
        call.mask.causal is not None or call.mask.since is not None
    ):
        lines.append("# attn_mask holds the causal part too")
    ends = "out, lse" if says.lse else "out"
    lines.append(f"{ends} = {attribute}({', '.join([inputs, *shown])})")
    if layout == "bhsd":
        lines.append("out = out.transpose(1, 2)")
    return "\n".join(lines)
