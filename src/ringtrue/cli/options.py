"""Options that several commands check alike; what cannot be is bad usage (exit 2), and the text lists what can."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import typer

import ringtrue as rt

DTYPES = ("float32", "bfloat16", "float16", "float64")


def one_of(option: str, value: str, valid: Iterable[str]) -> str:
    """The value, if it is valid."""
    valid = tuple(valid)
    if value not in valid:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(valid)}", param_hint=option)
    return value


def device_here(device: str) -> str:
    """cpu, or cuda where there is one."""
    if one_of("--device", device, ("cpu", "cuda")) == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device; use cpu", param_hint="--device")
    return device


def backends_here(device: str) -> tuple[str, ...]:
    """The names of the backends that can run on the device, best first."""
    return tuple(s.name for s in rt.backends() if s.device == device and s.unavailable is None)


def shape(option: str, text: str) -> tuple[int, ...]:
    """ "1,4608,24,128" -> (1, 4608, 24, 128)."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a shape such as 1,4608,24,128", param_hint=option)
    return tuple(int(part) for part in parts)


def bshd(option: str, text: str) -> tuple[int, int, int, int]:
    """A shape of four sizes: batch, length, heads, head dim."""
    sizes = shape(option, text)
    if len(sizes) != 4:
        raise typer.BadParameter(f"{text!r} has {len(sizes)} sizes; (B,S,H,D) has 4", param_hint=option)
    return sizes
