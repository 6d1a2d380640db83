"""Random numbers as pure functions of seed, purpose and sample, never of a generator's state.

So every process or worker that prepares a sample draws the same numbers for it, and a checkpoint
has no generator to save.
"""

import hashlib
import random

import numpy as np

_U64 = np.uint64
_TWO_53 = 2.0**53


def mix(x: np.ndarray | int, key: int) -> np.ndarray:
    """Hash integers to 64 well-mixed bits, vectorised: uint64[...] of the shape of `x`.

    For a fixed `key` this is a bijection of the 64-bit integers, so different `x` never collide.
    Source: the finaliser of SplitMix64 (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014).
    """
    with np.errstate(over="ignore"):
        x = (np.asarray(x).astype(_U64) + _U64(key)) * _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> _U64(31)))


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a purpose, as in `key_of(seed, "augmentation")`.

    It is the same in every process and Python version.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_uniform(x: np.ndarray, key: int) -> np.ndarray:
    """Uniform numbers in [0, 1) with 53 random bits: float64[...] of the shape of `x`.

    They are a pure function of (x, key).
    """
    bits = mix(x, key) >> _U64(11)
    return bits.astype(np.float64) / _TWO_53


def seed_generators(key: int) -> None:
    """Seed the three CPU generators that augmentations draw from: Python's, NumPy's and torch's.

    This takes about 6 µs. `torch.manual_seed` would also visit every accelerator and, in the CUDA
    build, format a traceback: 71-218 µs.
    """
    import torch  # late: importing torch takes long, and code that only reads data does not need it

    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
