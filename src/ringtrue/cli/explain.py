"""`ringtrue explain`: which backend would run a call, and every reason against each other one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

import ringtrue as rt

from .options import DTYPES, bshd, one_of, shape
from .output import as_json, reason, say

NOTHING = 1
DEVICES = tuple(sorted({support.device for support in rt.backends()}))
MASKS = ("bool", "float", "key_padding", "key_bias", "bottom_right", "segments", "window")
INPUTS = ("q", "k", "v", "mask")


def explain(
    query: Annotated[str, typer.Option(help="Shape of the query, B,S,H,D.")] = "1,4608,24,128",
    key: Annotated[str, typer.Option(help="Shape of the key; default: the query's.")] = "",
    value: Annotated[str, typer.Option(help="Shape of the value; default: the key's.")] = "",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda, also where it is not here.")] = "cpu",
    layout: Annotated[str, typer.Option(help="bshd or bhsd.")] = "bshd",
    mask: Annotated[
        list[str] | None, typer.Option(help=", ".join(MASKS) + "; may be repeated: masks joined by &.")
    ] = None,
    mask_shape: Annotated[str, typer.Option(help="Of a bool or float mask; default: Sq,Sk.")] = "",
    mask_dtype: Annotated[str, typer.Option(help="Of a float or key_bias mask; default: the query's.")] = "",
    causal: Annotated[bool, typer.Option("--causal", help="is_causal=True.")] = False,
    requires_grad: Annotated[str, typer.Option(help="Any of q, k, v, mask, joined by commas.")] = "",
    return_lse: Annotated[bool, typer.Option("--return-lse")] = False,
    gqa: Annotated[bool, typer.Option("--gqa", help="enable_gqa=True.")] = False,
    dropout: Annotated[float, typer.Option(help="dropout_p.")] = 0.0,
    softcap: Annotated[float, typer.Option()] = 0.0,
    scale: Annotated[float | None, typer.Option(help="Default: 1/sqrt(D).")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="A name of ringtrue.backends(), native, auto; default: RINGTRUE_BACKEND or auto."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Say which backend would run a call, and every reason against each other one; runs no kernel, needs no GPU.

    Exit 0: a backend would run. 1: none would, or not the one that was named. 2: bad usage.
    """
    wanted = tuple(one_of("--requires-grad", part.strip(), INPUTS) for part in requires_grad.split(",") if part.strip())
    q, k, v = _tensors(query, key, value, dtype, wanted)
    lengths = 1 if one_of("--layout", layout, ("bshd", "bhsd")) == "bshd" else 2
    device = one_of("--device", device.split(":")[0], DEVICES)
    _check_masks(mask or [], mask_shape, mask_dtype, "mask" in wanted)
    held = getattr(torch, one_of("--mask-dtype", mask_dtype or dtype, DTYPES))
    made = [_mask(kind, mask_shape, held, q, k, lengths, "mask" in wanted) for kind in mask or ()]
    arguments: dict[str, Any] = {
        "layout": layout, "is_causal": causal, "return_lse": return_lse, "enable_gqa": gqa, "dropout_p": dropout,
        "softcap": softcap, "scale": scale, "deterministic": deterministic or None, "backend": backend,
    }  # fmt: skip
    found: rt.Explanation | str
    try:
        masks = functools.reduce(operator.and_, made[1:], made[0]) if made else None
        found = rt.explain(q, k, v, masks, parallel=False, device=device, **arguments)
    except rt.ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    except rt.UnsupportedError as error:
        found = str(error)
    if json:
        typer.echo(as_json(as_dict(found, device)))
    else:
        show(found, device, backend or rt.current_backend(), Console(soft_wrap=False))
    runs = isinstance(found, rt.Explanation) and found.backend is not None
    raise typer.Exit(0 if runs else NOTHING)


def show(found: rt.Explanation | str, device: str, asked: object, console: Console) -> None:
    """The call, the answer, then a backend a paragraph with a reason a line."""
    if isinstance(found, str):
        say(console, Text.assemble(("refused", "bold red"), f" before anything is chosen: {found}"))
        return
    say(console, f"{found.call} on {device}")
    answer = (found.backend, "bold green") if found.backend else ("nothing", "bold red")
    say(console, Text.assemble("would run: ", answer, f" (asked for: {asked})"))
    if found.order_from:
        say(console, f"auto tries: {', '.join(found.order) or 'nothing'} ({found.order_from})")
    if device == "cuda" and not torch.cuda.is_available():
        say(console, "This machine has no CUDA device: what depends on the GPU and its libraries is judged from here.")
    for name, reasons in found.reasons.items():
        if name == found.backend:
            continue
        say(console, Text.assemble("\n", (name, "bold"), ": " + ("could run too" if not reasons else "cannot")))
        for why in reasons:
            say(console, f"  {why}")


def as_dict(found: rt.Explanation | str, device: str) -> dict[str, Any]:
    """The same as plain values; `refused` is the error of a call that no backend was asked about."""
    if isinstance(found, str):
        return {"device": device, "backend": None, "refused": found, "order": [], "order_from": "", "reasons": {}}
    reasons = {name: [reason(why) for why in against] for name, against in found.reasons.items()}
    return {
        "call": found.call,
        "device": device,
        "backend": found.backend,
        "refused": None,
        "order": found.order,
        "order_from": found.order_from,
        "reasons": reasons,
    }


def _tensors(query: str, key: str, value: str, dtype: str, wanted: tuple[str, ...]) -> list[Tensor]:
    """q, k, v without memory behind them: choosing looks at sizes, dtypes and flags only."""
    kind = getattr(torch, one_of("--dtype", dtype, DTYPES))
    shapes = [bshd("--query", query)]
    for option, text in (("--key", key), ("--value", value)):
        shapes.append(bshd(option, text) if text else shapes[-1])
    return [
        torch.empty(sizes, dtype=kind, device="meta", requires_grad=name in wanted)
        for name, sizes in zip("qkv", shapes, strict=True)
    ]


def _check_masks(kinds: list[str], mask_shape: str, mask_dtype: str, grad: bool) -> None:
    for kind in kinds:
        one_of("--mask", kind, MASKS)
    if grad and not {"float", "key_bias"} & set(kinds):
        raise typer.BadParameter("only a float or key_bias mask can require grad", param_hint="--requires-grad")
    if mask_dtype and not {"float", "key_bias"} & set(kinds):
        raise typer.BadParameter("belongs to --mask float or key_bias", param_hint="--mask-dtype")
    if mask_shape and not {"bool", "float"} & set(kinds):
        raise typer.BadParameter("belongs to --mask bool or float", param_hint="--mask-shape")


def _mask(kind: str, mask_shape: str, dtype: torch.dtype, q: Tensor, k: Tensor, lengths: int, grad: bool) -> Any:
    """One mask of a kind of MASKS; `dtype` is that of a float one, `lengths` the dim of q and k that holds theirs."""
    rows = shape("--mask-shape", mask_shape) if mask_shape else (q.shape[lengths], k.shape[lengths])
    queries, keys = ((x.shape[0], x.shape[lengths]) for x in (q, k))
    made: dict[str, Callable[[], Any]] = {
        "bool": lambda: rt.Dense(torch.empty(rows, dtype=torch.bool, device="meta")),
        "float": lambda: rt.Dense(torch.empty(rows, dtype=dtype, device="meta", requires_grad=grad)),
        "key_padding": lambda: rt.KeyPadding(torch.empty(keys, dtype=torch.bool, device="meta")),
        "key_bias": lambda: rt.KeyBias(torch.empty(keys, dtype=dtype, device="meta", requires_grad=grad)),
        "segments": lambda: rt.Segments(*(torch.empty(n, dtype=torch.int, device="meta") for n in (queries, keys))),
        "window": lambda: rt.Window(1, 1),  # which window makes no difference to a choice
        "bottom_right": lambda: rt.Causal("bottom_right"),
    }
    return made[kind]()
