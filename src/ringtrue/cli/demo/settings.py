"""What the demo is asked to do: values, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass

ENTROPY_LIMIT = 0.8  # of the entropy of uniform attention
MOST_RANKS = 16


class UsageError(ValueError):
    """An option that cannot be; its text lists what can."""


@dataclass(frozen=True)
class Mode:
    """One way to split the sequence over ranks."""

    ulysses: int
    ring: int

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def name(self) -> str:
        if self.ring == 1:
            return f"ulysses{self.ulysses}"
        return f"ring{self.ring}" if self.ulysses == 1 else f"{self.ulysses}x{self.ring}"


@dataclass(frozen=True)
class Settings:
    """The options of `ringtrue demo`."""

    modes: tuple[Mode, ...] = (Mode(2, 1), Mode(1, 2), Mode(2, 2))
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "auto"
    image_tokens: int = 81
    text_tokens: int = 23
    steps: int = 4
    seed: int = 0
    plant: str | None = None
    timeout: float = 180.0

    @property
    def text_lengths(self) -> tuple[int, int]:
        """Real text tokens of the two samples; the rest of the text is padding, which no query may attend to."""
        return self.text_tokens, self.text_tokens // 2


def parse_modes(text: str) -> tuple[Mode, ...]:
    """ "ulysses2,ring2,2x2" -> modes, each once. UsageError for anything else."""
    modes = [parse_mode(part.strip()) for part in text.split(",") if part.strip()]
    if not modes:
        raise UsageError(f"--modes is empty; {_MODES}")
    return tuple(dict.fromkeys(modes))


def parse_mode(text: str) -> Mode:
    """ "ulysses2", "ring4" or "2x2" (Ulysses x Ring) -> Mode. UsageError for anything else."""
    if match := re.fullmatch(r"ulysses(\d+)", text):
        mode = Mode(int(match[1]), 1)
    elif match := re.fullmatch(r"ring(\d+)", text):
        mode = Mode(1, int(match[1]))
    elif match := re.fullmatch(r"(\d+)x(\d+)", text):
        mode = Mode(int(match[1]), int(match[2]))
    else:
        raise UsageError(f"{text!r} is not a mode; {_MODES}")
    if not 2 <= mode.ranks <= MOST_RANKS:
        raise UsageError(
            f"mode {text!r} has {mode.ranks} rank{'s' if mode.ranks != 1 else ''}; 2 to {MOST_RANKS} are possible"
        )
    return mode


_MODES = "modes are ulyssesU, ringR and UxR (Ulysses degree x ring degree), for example ulysses2,ring2,2x2"
