from __future__ import annotations

import numpy as np
import pytest

from lede.envs.stream_draws import first_draws
from lede.seeding import Purpose, numpy_stream


@pytest.mark.parametrize("seed", [0, 3, 2**31 - 1, 2**32 + 7, 2**150 + 11])
def test_draws_are_those_of_the_streams(seed: int) -> None:
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(0, 2**32, 50), rng.integers(0, 500, 50)
    expected = [
        numpy_stream(seed, Purpose.MATCHES, int(p), int(t)).random() for p, t in zip(prompts, tokens, strict=True)
    ]
    np.testing.assert_array_equal(first_draws(seed, Purpose.MATCHES, prompts, tokens), expected)


def test_no_draws() -> None:
    assert first_draws(0, Purpose.MATCHES, np.zeros(0, dtype=int)).shape == (0,)
