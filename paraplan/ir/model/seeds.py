"""Random seeds of segment instances: a pure function of (base seed, step, segment)."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def segment_seed(base: int, step: int, segment: int) -> int:
    """Seed of one segment at one step, in [0, 2^63).

    Args:
        base: the run's seed.
        step: index of the training step.
        segment: index of the segment in the program.
    """
    return _mix(_mix(_mix(base & _MASK) ^ (step & _MASK)) ^ (segment & _MASK)) >> 1
