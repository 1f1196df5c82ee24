"""Versions that were seen to work together, and the page that says so: data for `ringtrue doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Versions that were in use when what is on `page` (of the repository) was run; names as doctor shows them.

    A version without "+" stands for every build of it.
    """

    page: str
    what: str
    versions: Mapping[str, str]

    def differences(self, here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """What is there and is of another version: name -> (here, there)."""
        return {
            name: (here[name], version)
            for name, version in self.versions.items()
            if name in here and version not in (here[name], here[name].split("+")[0])
        }


H200 = {"torch": "2.11.0+cu130", "CUDA": "13.0", "cuDNN": "91900", "GPU 0": "NVIDIA H200"}
FLASH_4 = {
    "flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1",
    "quack-kernels": "0.6.5", "apache-tvm-ffi": "0.1.15.post2",
}  # fmt: skip
SIDE_BY_SIDE = {"nvidia-cudnn-frontend": "1.32.0", "sageattention": "1.0.6"}
KNOWN: tuple[Known, ...] = (
    Known("docs/verified/2026-12-01-1xH200-audit-backends.md", "optional kernels", {**H200, **FLASH_4, **SIDE_BY_SIDE}),
    Known("docs/verified/2026-11-30-1xH200-issue4.md", "all tests on a GPU", H200),
    Known("docs/verified/2026-11-30-1xH200-rounds.md", "beside diffusers", {**H200, "diffusers": "0.42.1"}),
    Known("constraints.txt", "every run of the tests, on a CPU", {"torch": "2.13.0", "diffusers": "0.42.1"}),
)
