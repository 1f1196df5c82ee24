"""What is installed here, and what of it is broken: what `ringtrue doctor` prints. Imports every optional package."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import ringtrue as rt

from ..integrations.diffusers.models import NAMES, PACKAGE
from .known_versions import KNOWN, Known

MISSING, VERSION = "package-missing", "package-version"
TRITON = rt.optional.Package("triton", "pip install triton, in the release that this torch asks for")
OTHERS = {TRITON: "rings on a GPU", PACKAGE: "integrations.diffusers, demo"}
PARTS = {PACKAGE: NAMES}  # what is imported of a package that is there
DRIVER = Path("/proc/driver/nvidia/version")
ALONE = "its claims alone"


@dataclass(frozen=True)
class Part:
    """An optional package, or a part or a range of releases of one: `why` is None where it can be used, `serves` what
    needs it; `elsewhere`: what needs another release of it can use this one."""

    package: rt.optional.Package
    version: str
    why: rt.Reason | None
    serves: tuple[str, ...]
    elsewhere: bool = False

    @property
    def name(self) -> str:
        """What pip calls it; the module too, where it is another."""
        return self.package.distribution or self.package.module.split(".")[0]

    @property
    def broken(self) -> bool:
        """Whether it is installed and cannot be used; what is not installed is not broken, nor is a release that is
        only too old or too new for some."""
        if self.why is None or self.why.code == MISSING:
            return False
        return not (self.why.code == VERSION and self.elsewhere)


@dataclass(frozen=True)
class Trouble:
    """Something that is installed and cannot be used, why, and what mends it ("" where nothing is known to)."""

    name: str
    why: rt.Reason


@dataclass(frozen=True)
class Installed:
    """All of it. `versions`: of torch and what comes with it, and of every package that is there."""

    versions: Mapping[str, str]
    parts: tuple[Part, ...]
    troubles: tuple[Trouble, ...]
    nearest: Known


def look(supports: Iterable[rt.Support] | None = None) -> Installed:
    """What is here, in this process."""
    supports = tuple(rt.backends() if supports is None else supports)
    parts = _parts(supports)
    versions = {**base(), **{part.name: part.version for part in parts if part.version}}
    troubles = [Trouble(part.name, part.why) for part in parts if part.why is not None and part.broken]
    troubles += _of_backends(supports, {part.package: part for part in parts})
    if (driver := _driver()) is not None:
        troubles.append(Trouble("CUDA", driver))
    nearest = min(KNOWN, key=lambda known: (len(known.differences(versions)), -_shared(known, versions)))
    return Installed(versions, parts, tuple(troubles), nearest)


def base() -> dict[str, str]:
    """What is there with every install."""
    found = {
        "ringtrue": rt.__version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or ""),
        "cuDNN": str(torch.backends.cudnn.version() or "") if torch.version.cuda else "",
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found[f"GPU {index}"] = torch.cuda.get_device_name(index)
    return {name: version for name, version in found.items() if version}


def _parts(supports: Iterable[rt.Support]) -> tuple[Part, ...]:
    serves: dict[rt.optional.Package, list[str]] = {}
    for support in supports:
        for package in support.packages:
            names = serves.setdefault(package, [])
            names += [support.name] * (support.name not in names)
    for package, what in OTHERS.items():
        serves.setdefault(package, []).append(what)
    parts = [Part(package, _version(package), _why(package), tuple(names)) for package, names in serves.items()]
    usable = {part.name for part in parts if part.why is None}
    return tuple(replace(part, elsewhere=part.name in usable) for part in parts)


def _why(package: rt.optional.Package) -> rt.Reason | None:
    part = PARTS.get(package)
    return rt.optional.why_not(package) or (None if part is None else rt.optional.why_not(part))


def _version(package: rt.optional.Package) -> str:
    """Of the distribution; "" where there is none."""
    try:
        return importlib.metadata.version(package.distribution or package.module.split(".")[0]) or ""
    except Exception:  # none, or metadata that cannot be read: `why_not` says it
        return ""


def _of_backends(supports: Iterable[rt.Support], parts: Mapping[rt.optional.Package, Part]) -> list[Trouble]:
    """Backends that lack nothing and cannot run all the same: mixed releases, another torch, a moved function."""
    names: dict[rt.Reason, list[str]] = {}
    for support in supports:
        needs = [parts[package].why for package in support.packages]
        if any(need is not None and need.code == MISSING for need in needs):
            continue
        why = software(support)
        if why is not None and why not in needs and why.code not in (MISSING, "device"):
            names.setdefault(why, []).append(f"{support.name} on {support.device}")
    return [Trouble(", ".join(which), why) for why, which in names.items()]


def software(support: rt.Support) -> rt.Reason | None:
    """Why what a backend needs cannot be used, whether its device is here or not."""
    x = torch.empty(1, 2, 1, 8, dtype=torch.float16, device="meta")
    pair = replace(rt.op_pair(support.name, support.device), name=ALONE)
    reasons = rt.explain(x, x, x, device=support.device, parallel=False, backend=pair).reasons
    claimed = {why.code for why in reasons[ALONE]}
    return next((why for why in reasons[support.name] if why.code not in claimed), None)


def _driver() -> rt.Reason | None:
    """A GPU's driver is there, torch is built for CUDA, and yet torch finds no device."""
    if torch.version.cuda is None or torch.cuda.is_available() or not DRIVER.exists():
        return None
    return rt.Reason(
        "driver",
        "torch finds no CUDA device beside a driver of NVIDIA",
        f"a driver for CUDA {torch.version.cuda}, a device that this process may see",
        " ".join(DRIVER.read_text("utf-8").split("\n")[0].split()),
        "install a torch built for the CUDA that nvidia-smi shows, or an older one; see CUDA_VISIBLE_DEVICES, too",
    )


def _shared(known: Known, here: Mapping[str, str]) -> int:
    return len(known.versions.keys() & here.keys())
