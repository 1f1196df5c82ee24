"""Kernels of the hub, loaded by the `kernels` package: pinned to a version, and only for a call that names the backend.

`kernels` finds them, in this order: in a folder that its variable LOCAL_KERNELS names for the repository
("owner/name=folder", several joined by ":"), in the cache where HF_HUB_OFFLINE is set, else on the hub, of which it
downloads only the build for this machine into the cache. Where the hub cannot be reached, the cache is searched here
for a snapshot of that version: `kernels` itself finds a version there only by a name that it does not always write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..contract import Package, Reason
from ..optional import loaded, told

PACKAGE = Package(
    "kernels", 'pip install "kernels>=0.14"', at_least="0.14", attributes=("get_kernel", "get_local_kernel")
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of the hub.

    repo        owner and name
    version     the version of its functions' arguments that was read; the hub keeps a branch for each
    part        the module of it that has the functions, "" = itself
    attributes  the functions that are needed
    """

    repo: str
    version: int
    attributes: tuple[str, ...]
    part: str = "flash_attn_interface"


@cache
def module(kernel: Kernel) -> Any:
    """The part of the kernel with the functions; downloaded if need be. Whatever loading raises; AttributeError."""
    found = _found(kernel)
    found = getattr(found, kernel.part) if kernel.part else found
    for name in kernel.attributes:
        getattr(found, name)
    return found


def fetch(kernel: Kernel, device: str) -> Reason | None:
    """Loads the kernel for a call that asks for it, and says why it cannot be had."""
    try:
        module(kernel)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # another project's code ran: it may raise anything
        return Reason(
            "kernel-not-loaded",
            f"{kernel.repo} cannot be loaded: {told(error)}",
            f"version {kernel.version}, from the hub, the cache or a local folder",
            remedy=f"go online once, or set LOCAL_KERNELS={kernel.repo}=<folder>",
        )
    return None


def _found(kernel: Kernel) -> Any:
    kernels = loaded(PACKAGE)
    try:
        return kernels.get_kernel(kernel.repo, version=kernel.version)
    except Exception:
        for folder in cached(kernel):
            return kernels.get_local_kernel(folder)
        raise


def cached(kernel: Kernel) -> Iterator[Path]:
    """Snapshots of that version in the cache, the newest first."""
    from huggingface_hub import constants  # needed by `kernels`, so it is there

    root = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    name = kernel.repo.replace("/", "--")
    snapshots = [found for kind in ("kernels", "models") for found in root.glob(f"{kind}--{name}/snapshots/*")]
    for folder in sorted(snapshots, key=lambda found: found.stat().st_mtime, reverse=True):
        if kernel.version in {_version(file) for file in folder.glob("build/*/metadata.json")}:
            yield folder


def _version(metadata: Path) -> object:
    try:
        return json.loads(metadata.read_text("utf-8")).get("version")
    except (OSError, ValueError, AttributeError):  # half a download
        return None
