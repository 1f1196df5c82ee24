"""The declared order of `auto`: data. For a device and a kind of call the names, best first, and where it was measured.

Only what was measured on a device is in its order; a name that is not installed, or does not fit, is passed over. To
declare another backend, put its name where its figures belong and name the page that has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from .contract import Facts

LONG = 16384  # tokens; what stands for a length that must not be looked at
NATIVE = ("native_cudnn", "native_flash", "native_efficient", "native_math")
H200 = "docs/verified/2026-11-30-1xH200-bench.md"
LONG_H200 = "docs/verified/2026-12-01-1xH200-speed.md"
CPU = "docs/measured/cpu-order.md"


@dataclass(frozen=True)
class Row:
    """An order and the calls that it is for; of several that are for a call the first one holds.

    names       best first
    page        of this repository: the figures that it was taken from
    on          the machine they were measured on
    capability  the compute capability of the CUDA device; None = any, and where none is known
    at_least    weights of a head, q_len x k_len
    causal      for causal calls or for the others only; None = both
    masked      for calls with any other mask, or for those without; None = both
    """

    device: str
    names: tuple[str, ...]
    page: str
    on: str
    capability: tuple[int, int] | None = None
    at_least: int = 0
    causal: bool | None = None
    masked: bool | None = None

    def holds(self, facts: Facts) -> bool:
        """Whether it is for a call with these facts."""
        return (
            self.device == facts.device
            and self.capability in (None, facts.capability)
            and (not self.at_least or facts.q_len * facts.k_len >= self.at_least)
            and self.causal in (None, facts.causal is not None)
            and self.masked in (None, bool(facts.mask_kinds))
        )


ROWS: tuple[Row, ...] = (
    Row("cuda", ("flash_4", *NATIVE), LONG_H200, "H200", capability=(9, 0), at_least=4608**2),
    Row("cuda", NATIVE, H200, "H200", capability=(9, 0)),
    Row(
        "cuda", NATIVE, H200, "H200"
    ),  # other GPUs, as long as nobody measured them: what every torch has, in its order
    Row("cpu", ("native_flash", "native_math"), CPU, "AMD EPYC"),
)


class Order(NamedTuple):
    """What `auto` tries, best first; where that comes from, in words; what else there is to know of it."""

    names: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()


def declared(facts: Facts) -> Order:
    """The order that this release declares for a call; nothing for a device on which nothing was measured."""
    row = next((row for row in ROWS if row.holds(facts)), None)
    if row is None:
        return Order((), f"declared: nothing was measured on {facts.device}")
    return Order(row.names, f"declared: {row.page}, measured on {row.on}")


def blind(facts: Facts) -> Facts:
    """The facts as where the order must not hang on lengths and masks: those that torch.compile traces are symbols,
    and ranks that exchange nothing may have others. The order is then that of long calls without a mask."""
    return replace(facts, q_len=LONG, k_len=LONG, mask_kinds=frozenset())
