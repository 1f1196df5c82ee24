"""What measured numbers belong to: versions, of optional packages too, device, threads, commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import ringtrue as rt


def environment(device: str, commit: str = "") -> dict[str, str]:
    """Plain strings. `commit`: of ringtrue's source, where git cannot tell (an installed wheel, a copy of the tree)."""
    found = {
        "ringtrue": rt.__version__,
        "commit": commit or _commit(),
        "torch": str(torch.__version__),
        "diffusers": _distribution("diffusers"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "device": device,
    }
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    needed = {p.distribution or p.module.split(".")[0] for support in rt.backends() for p in support.packages}
    there = ((name, _distribution(name)) for name in sorted(needed))
    return found | {name: version for name, version in there if version != "not installed"}


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the clone this package lies in, "+" after it when files differ from it; else "unknown"."""
    here = Path(__file__).parent
    try:
        if _git(here, "ls-files", Path(__file__).name) == "":
            return "unknown"  # a clone of something else
        return _git(here, "rev-parse", "HEAD") + ("+" if _git(here, "status", "--porcelain", ":/src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
