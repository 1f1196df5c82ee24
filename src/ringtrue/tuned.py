"""What `ringtrue tune` measured on this machine: a small file, read once, by the first call of `auto`, and told.

RINGTRUE_TUNED names the file, or is "off"; else it is ringtrue/tuned.json in the user's cache folder (XDG_CACHE_HOME).
It has an entry a machine, keyed by all that its figures hang on. An entry of another machine or of other versions is
not used, nor is a file that cannot be read; `explain` says so. Code that torch traces never comes here.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .backends import REGISTRY
from .contract import Facts
from .order import Order
from .version import __version__

VARIABLE, OFF = "RINGTRUE_TUNED", "off"
FORMAT = 1
NEAR = 4.0  # a call is taken for like a measured one whose lengths and head dim are at most so many times its own


class Measured(NamedTuple):
    """One shape, and what was found at it.

    order    names that were right, fastest first
    wrong    names that were not, and what was: `auto` leaves them out
    failed   names that raised, and what: `auto` tries them last
    seconds  a call of each in `order`, forward and backward
    """

    dtype: str
    q_len: int
    k_len: int
    head_dim: int
    causal: bool
    order: tuple[str, ...]
    wrong: Mapping[str, str] = {}
    failed: Mapping[str, str] = {}
    seconds: Mapping[str, float] = {}


class Found(NamedTuple):
    """What there is for one kind of device here; `notes` says what there is and is not used, and why."""

    shapes: tuple[Measured, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()


def place() -> Path | None:
    """The file; None where it is switched off, or where there is no home."""
    said = os.environ.get(VARIABLE)
    if said == OFF:
        return None
    with suppress(RuntimeError):  # no home
        folder = os.environ.get("XDG_CACHE_HOME")
        return Path(said) if said else (Path(folder) if folder else Path.home() / ".cache") / "ringtrue" / "tuned.json"
    return None


def key(device: str) -> dict[str, Any]:
    """All that figures of this machine hang on, as plain values."""
    found: dict[str, Any] = {"device": device, "ringtrue": __version__, "torch": str(torch.__version__)}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
        found["capability"] = list(torch.cuda.get_device_capability())
        found["cuDNN"] = torch.backends.cudnn.version()
    else:
        found["name"] = _processor()
    packages = {p.distribution or p.module.split(".")[0] for b in REGISTRY if device in b.pairs for p in b.packages}
    for name in sorted(packages):
        with suppress(Exception):  # not there, or metadata that cannot be read
            found[name] = importlib.metadata.version(name)
    return found


@cache
def found(device: str) -> Found:
    """What the file has for this machine, read once in a process; a warning, once, where it cannot be read."""
    path = place()
    if path is None:
        return Found(notes=(f"tuned: switched off by {VARIABLE}",) if os.environ.get(VARIABLE) == OFF else ())
    if device == "cuda" and not torch.cuda.is_available():  # judged for another machine
        return Found()
    try:
        entries = read(path)
    except FileNotFoundError:
        return Found(notes=(f"tuned: {VARIABLE} names {path}, which is not there",) if os.environ.get(VARIABLE) else ())
    except (OSError, ValueError) as error:
        note = f"tuned: {path} cannot be read and is not used ({error}); ringtrue tune writes it anew"
        warnings.warn(note, stacklevel=2)
        return Found(notes=(note,))
    mine = key(device)
    there = [entry for entry in entries if entry["key"].get("device") == device]
    entry = next((entry for entry in there if entry["key"] == mine), None)
    if entry is not None:
        return Found(entry["shapes"], f"tuned: {path}, {entry['date']}")
    if not there:
        return Found()
    other = min((_differences(entry["key"], mine) for entry in there), key=len)
    return Found(notes=(f"tuned: {path} is not used, it was measured with {', '.join(other)}; run ringtrue tune",))


def forget() -> None:
    """Read the file again at the next call that is not known yet."""
    found.cache_clear()


def order(facts: Facts, declared: Order) -> Order:
    """The order that was measured here at a shape like the call's, with what else is declared behind it; else that
    which is declared. It adds no claim: what does not fit the call, or has no backward, is passed over as ever."""
    here = found(facts.device)
    notes = (*declared.notes, *here.notes)
    like = [shape for shape in here.shapes if _distance(shape, facts) <= math.log(NEAR)]
    if not like:
        if here.shapes:
            notes = (*notes, f"{here.source} has no shape like this call's")
        return declared._replace(notes=notes)
    shape = min(like, key=lambda shape: _distance(shape, facts))
    others = [name for name in declared.names if name not in shape.order and name not in shape.wrong]
    names = (*shape.order, *sorted(others, key=lambda name: name in shape.failed))
    at = f"{shape.q_len} x {shape.k_len} tokens, head dim {shape.head_dim}"
    wrong = (f"{name} is left out, it was wrong here: {why}" for name, why in shape.wrong.items())
    failed = (f"{name} comes last, it failed here: {why}" for name, why in shape.failed.items() if name in names)
    return Order(names, f"{here.source}, at {at}", (*notes, *wrong, *failed))


def read(path: Path) -> list[dict[str, Any]]:
    """The entries: "key", "date" and "shapes". OSError, or ValueError for a file that no `remember` wrote."""
    try:
        whole = json.loads(path.read_text("utf-8"))
        if whole["format"] != FORMAT:
            raise ValueError(f"format {whole['format']!r}, not {FORMAT}")
        return [
            {"key": dict(e["key"]), "date": str(e["date"]), "shapes": tuple(_shape(s) for s in e["shapes"])}
            for e in whole["entries"]
        ]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def remember(path: Path, device: str, date: str, shapes: Sequence[Measured]) -> bool:
    """Put what was measured into the file, beside other machines and other shapes of this one; whole or not at all.

    False where what was there could not be read, and is gone. OSError where it cannot be written.
    """
    mine, readable = key(device), True
    try:
        entries = read(path)
    except FileNotFoundError:
        entries = []
    except ValueError:
        entries, readable = [], False
    before = next((entry["shapes"] for entry in entries if entry["key"] == mine), ())
    kept = {shape[:5]: shape for shape in (*before, *shapes)}
    entries = [entry for entry in entries if entry["key"] != mine]
    entries.append({"key": mine, "date": date, "shapes": [shape._asdict() for shape in kept.values()]})
    for entry in entries[:-1]:
        entry["shapes"] = [shape._asdict() for shape in entry["shapes"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n", "utf-8")
    part.replace(path)
    return readable


def _shape(said: Mapping[str, Any]) -> Measured:
    """One shape of the file; ValueError or TypeError unless each value is of its kind."""
    shape = Measured(**{**said, "order": tuple(said["order"])})
    texts = (shape.dtype, *shape.order, *(x for why in (shape.wrong, shape.failed) for x in (*why, *why.values())))
    right = (
        all(type(n) is int and 0 < n < 2**63 for n in (shape.q_len, shape.k_len, shape.head_dim))
        and isinstance(said["causal"], bool)
        and isinstance(said["order"], list)
        and all(isinstance(text, str) for text in texts)
    )
    if not right:
        raise ValueError(f"no such shape: {said}")
    return shape


def _distance(shape: Measured, facts: Facts) -> float:
    """How far a measured shape is from a call's: the largest factor between two sizes, as a logarithm."""
    masked = bool(facts.mask_kinds) or 0 in (facts.q_len, facts.k_len, facts.head_dim)
    if masked or shape.dtype != str(facts.dtype) or shape.causal != (facts.causal is not None):
        return math.inf
    sizes = ((shape.q_len, facts.q_len), (shape.k_len, facts.k_len), (shape.head_dim, facts.head_dim))
    return max(abs(math.log(there / here)) for there, here in sizes)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """["torch 2.11.0 (here 2.12.0)"]."""
    names = dict.fromkeys((*there, *here))
    return [
        f"{name} {there.get(name, 'absent')} (here {here.get(name, 'absent')})"
        for name in names
        if there.get(name) != here.get(name)
    ]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
