"""Whether an optional package can be used here, and if not, why: as a Reason, for the backend or integration it serves.

A broken package costs nothing but itself: nothing is imported until somebody asks, whatever its import raises becomes
a reason, and the answer is kept. `find_spec` proves nothing: a remnant of a removed package is found too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from contextlib import suppress
from functools import cache
from typing import Any

from torch.torch_version import TorchVersion

from .contract import Package, Reason

__all__ = ["Package", "loaded", "why_not"]

_PRE = re.compile(r"^[^+]*(a|b|rc|dev)\d")  # PEP 440; what follows a plus is no part of the release


@cache
def why_not(package: Package) -> Reason | None:
    """None when the package can be used, else the reason; it is imported by the first call, and asked once a process.

    package-missing  it is not installed
    package-version  a release that was not tried, or one that does not say which it is
    package-broken   its import raised (ImportError, an undefined symbol as OSError, RuntimeError, anything), it is a
                     folder that a removed package left behind, or it lacks a name that is needed
    """
    name, version = package.distribution or package.module.split(".")[0], ""
    try:
        with suppress(importlib.metadata.PackageNotFoundError, KeyError):  # else the module itself may say
            version = importlib.metadata.version(name) or ""
    except Exception as error:  # metadata that cannot be read
        return _broken(package, f"{name} has broken metadata: {type(error).__name__}: {error}", "")
    if version and not _within(package, version):
        return _version(package, name, version)
    try:
        module = importlib.import_module(package.module)
        if getattr(module, "__file__", None) is None:
            return _broken(package, f"{name} is a folder without code, as a removed package leaves behind", version)
        version = str(getattr(module, "__version__", version))
        if not _within(package, version):
            return _version(package, name, version)
        for attribute in package.attributes:
            where: object = module
            for part in attribute.split("."):
                where = getattr(where, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # another project's code ran: it may raise anything, and exit, or panic as Rust does
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, package.module):
            if version:
                text = f"{name} {version} is installed without {package.module}"
                return _broken(package, text, version, anew(package.install))
            text = f"{package.module} is not installed"
            return Reason("package-missing", text, package.module, "absent", package.install)
        lacks = (error.name or "") if isinstance(error, ModuleNotFoundError) else package.module
        elsewhere = not lacks.startswith(package.module.split(".")[0])  # then pip brings it
        mend = package.install if elsewhere else anew(package.install)
        return _broken(package, f"{name} cannot be imported: {told(error)}", version, mend)
    return None


def told(error: BaseException) -> str:
    """An error of another project's code in one line, even where its text cannot be made."""
    try:
        said = (str(error).strip().splitlines() or [""])[0]
    except Exception as broken:
        said = f"its text raises {type(broken).__name__}"
    return f"{type(error).__name__}: {said}"


@cache
def loaded(package: Package) -> Any:
    """The module of a package that can be used; ImportError with the reason for one that cannot."""
    reason = why_not(package)
    if reason is not None:
        raise ImportError(str(reason))
    return importlib.import_module(package.module)


def _within(package: Package, version: str) -> bool:
    if not (package.at_least or package.below):
        return True
    if not re.match(r"(\d+!)?\d+(\.\d+)*", version) or (_PRE.search(version) and not package.pre):
        return False
    seen = TorchVersion(version)
    return seen >= (package.at_least or "0.dev0") and not (package.below and seen >= f"{package.below}.dev0")


def _version(package: Package, name: str, seen: str) -> Reason:
    bounds = [f">= {package.at_least}"] * bool(package.at_least) + [f"< {package.below}"] * bool(package.below)
    limit = ", ".join(bounds) + ("" if package.pre else ", no pre-release")
    return Reason(
        "package-version", f"this release of {name} is not supported", limit, seen or "it does not say", package.install
    )


def _broken(package: Package, text: str, version: str, mend: str | None = None) -> Reason:
    mend = anew(package.install) if mend is None else mend
    return Reason("package-broken", text, f"a working {package.module}", version, mend)


def anew(install: str) -> str:
    """The same for a package that is there: else pip finds it satisfied, or takes the build that it kept. Its own files
    alone: with all that it needs, torch would be another."""
    if "ringtrue[" in install:
        return install
    return install.replace("pip install ", "pip install --force-reinstall --no-deps --no-cache-dir ", 1)


def _is_part(missing: str | None, module: str) -> bool:
    """Whether what was not found is the module itself or a package around it, not something that it imports."""
    return missing is not None and (module == missing or module.startswith(f"{missing}."))
