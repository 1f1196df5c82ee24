"""A hash of random states, for kernels whose own generators do not tell neighbouring states apart."""

from __future__ import annotations

_WORD = 2**64 - 1


def mixed(seed: int, offset: int) -> int:
    """(seed, offset) -> 64 bits, each of which depends on every bit of both."""
    return _finished(_finished(seed) + offset)


def _finished(x: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): a bijection in which every bit reaches every other."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _WORD
    return x ^ x >> 31
