"""The one table of numbers behind every judgement; reports print it, nothing else holds a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True)
class RingLimits:
    """Largest allowed ratios of the errors at 1, 2 and 16 ranks."""

    sixteen_to_one: float
    sixteen_to_two: float
    two_to_one: float


@dataclass(frozen=True)
class Rule:
    """A quantity x passes on its own when, with ref the truth and yard the yardstick,

        ||x - ref||_2  <= max(yard_2   ||yard - ref||_2 + floor ||ref||_2,  noise_2   N_2)
        max|x - ref|   <= max(yard_inf max|yard - ref|  + floor max|ref|,   noise_inf N_inf)

    N is the rounding scale of the problem (noise.py). The two terms are never added: a sum would let an lse rounded to
    bfloat16 pass. unit is near the rms of one rounding; unit_32 that of the arithmetic around it.
    """

    yard_2: float = 1.5
    yard_inf: float = 2.0
    noise_2: float = 3.0
    noise_inf: float = 6.0
    floor: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
    )
    unit: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {
            torch.float64: 2.0**-52,
            torch.float32: 2.0**-24,
            torch.bfloat16: 2.0**-9,
            torch.float16: 2.0**-12,
        }
    )
    ring: Mapping[str, RingLimits] = field(
        default_factory=lambda: {
            "16-bit": RingLimits(sixteen_to_one=1.35, sixteen_to_two=1.1, two_to_one=1.45),
            "float32": RingLimits(sixteen_to_one=1.6, sixteen_to_two=1.1, two_to_one=1.6),
        }
    )

    def unit_32(self, dtype: torch.dtype) -> float:
        """The rounding of scores, weights and sums for inputs of `dtype`: float32's, but for float64 inputs."""
        return self.unit[torch.float64 if dtype == torch.float64 else torch.float32]


Arithmetic = Literal["float32", "16-bit"]
RULE = Rule()
