"""First numbers of many random streams at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lede.seeding import Purpose

_POOL = 4  # words of SeedSequence's pool
_WORD = 0xFFFFFFFF
_MULTIPLIER = (0x2360ED051FC65DA4, 0x4385DF649FCCF645)  # PCG64's, as two halves

Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint64]


def first_draws(seed: int, purpose: Purpose, *index: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """`numpy_stream(seed, purpose, *index).random()` for arrays of indices `(draw,)` below 2^32, bit for bit.

    A generator takes longer to make than a whole step of a hundred lanes, so what numpy's SeedSequence and PCG64 do is
    done here on arrays. Both are fixed: numpy promises that the stream of a bit generator does not change.

    Source: PCG XSL-RR 128/64 (M. E. O'Neill, PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms
    for Random Number Generation, 2014); the seeding is numpy's.
    """
    state_high, state_low, stream_high, stream_low = _seeded(_pool(seed, purpose, index))
    increment = (stream_high << np.uint64(1) | stream_low >> np.uint64(63), stream_low << np.uint64(1) | np.uint64(1))
    high, low = _add((state_high, state_low), increment)
    for _ in range(2):  # one step ends the seeding, one precedes the first number
        high, low = _add(_multiply(high, low), increment)
    turn, mixed = high >> np.uint64(58), high ^ low
    number = mixed >> turn | mixed << (-turn & np.uint64(63))
    return (number >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _pool(seed: int, purpose: Purpose, index: tuple[npt.NDArray[np.integer], ...]) -> list[Words]:
    """The pool of every draw's SeedSequence."""
    key = [seed >> shift & _WORD for shift in range(0, max(seed.bit_length(), 1), 32)]
    key += [0] * (_POOL - len(key)) + [int(purpose)]
    columns = np.broadcast_arrays(*index)
    words = [np.full(columns[0].shape, word, dtype=np.uint32) for word in key] + [c.astype(np.uint32) for c in columns]
    scrambled = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [scrambled(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _blend(pool[target], scrambled(pool[source]))
    for word in words[_POOL:]:
        pool = [_blend(each, scrambled(word)) for each in pool]
    return pool


def _seeded(pool: list[Words]) -> list[Halves]:
    """Two numbers of 128 bits from the pool, high halves first."""
    scrambled = _Hash(0x8B51F9DD, 0x58F38DED)
    words = [scrambled(pool[i % _POOL]).astype(np.uint64) for i in range(8)]
    return [words[i] | words[i + 1] << np.uint64(32) for i in range(0, 8, 2)]


class _Hash:
    """SeedSequence's hash of one word, whose constant changes with every call."""

    def __init__(self, constant: int, multiplier: int) -> None:
        self._constant, self._multiplier = constant, multiplier

    def __call__(self, word: Words) -> Words:
        word = word ^ np.uint32(self._constant)
        self._constant = self._constant * self._multiplier & _WORD
        word = word * np.uint32(self._constant)
        return word ^ word >> np.uint32(16)


def _blend(one: Words, other: Words) -> Words:
    mixed: Words = one * np.uint32(0xCA01F9DD) - other * np.uint32(0x4973F715)
    return mixed ^ mixed >> np.uint32(16)


def _add(one: tuple[Halves, Halves], other: tuple[Halves, Halves]) -> tuple[Halves, Halves]:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]), low


def _multiply(high: Halves, low: Halves) -> tuple[Halves, Halves]:
    """Times PCG64's multiplier, modulo 2^128."""
    times_high, times_low = (np.uint64(half) for half in _MULTIPLIER)
    half, ones = np.uint64(32), np.uint64(_WORD)
    a, b, c, d = low >> half, low & ones, times_low >> half, times_low & ones
    middle = a * d + (b * d >> half)
    other = (middle & ones) + b * c
    carried = a * c + (middle >> half) + (other >> half)
    return carried + high * times_low + low * times_high, low * times_low
