"""Random numbers are pure functions of their purpose and position, and are statistically random."""

import random
import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from common.randomness import key_of, mix, sample_uniform, seed_generators

KEYS = st.integers(0, 2**64 - 1)


@given(arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 2**62)), KEYS)
def test_a_number_depends_only_on_its_position_and_key(x: np.ndarray, key: int) -> None:
    values = mix(x, key)
    for i, position in enumerate(x):
        assert mix(position, key) == values[i]
    assert np.array_equal(mix(x[::-1], key), values[::-1])
    assert np.array_equal(sample_uniform(x.reshape(1, -1), key)[0], sample_uniform(x, key))


def test_mixing_never_collides_and_turns_half_of_the_bits() -> None:
    x = np.arange(200_000)
    mixed = mix(x, 7)
    assert mixed.dtype == np.uint64 and len(np.unique(mixed)) == len(x)
    # Avalanche: flipping one bit of the input flips each bit of the output at even odds.
    for bit in range(0, 63, 7):
        flipped = mixed ^ mix(x ^ (1 << bit), 7)
        bits = np.unpackbits(flipped.view(np.uint8).reshape(-1, 8), axis=1)
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / len(x) ** 0.5


def test_uniforms_are_uniform_and_independent_between_keys() -> None:
    first = sample_uniform(np.arange(100_000), key_of(0, "a"))
    second = sample_uniform(np.arange(100_000), key_of(0, "b"))
    assert 0 <= first.min() and first.max() < 1
    counts = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])[0]
    # chi-square with 99 degrees of freedom: p = 0.001.
    assert ((counts - 1000) ** 2 / 1000).sum() < 149
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 4 / len(first) ** 0.5


def test_keys_differ_by_purpose_and_agree_in_every_process() -> None:
    parts = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        ("0", "a"),
        (0, "a", 0),
        (0,),
        ("0, 'a'",),
        (-1, "a"),
        (2**70, "a"),
    ]
    keys = [key_of(*each) for each in parts]
    assert len(set(keys)) == len(parts) and all(0 <= key < 2**64 for key in keys)
    code = f"from common.randomness import key_of; print([key_of(*each) for each in {parts!r}])"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == str(keys)


@given(KEYS)
def test_seeding_makes_every_generator_a_function_of_the_key(key: int) -> None:
    def draw() -> tuple:
        return random.random(), np.random.rand(), torch.rand(()).item()

    seed_generators(key)
    numbers = draw()
    draw()
    seed_generators(key)
    assert draw() == numbers
    seed_generators(key ^ 1)
    assert (np.array(draw()) != np.array(numbers)).all()
