"""What a transition takes before compression: the figure that documents and `lede buffer info` state."""

from __future__ import annotations

from typing import Any

import pytest

from lede.buffers.columns import row_bytes, row_columns, stack, transition_bytes
from lede.features import TEXT_FEATURES, FeatureConfig
from tests.buffers.samples import N_LAYERS, make_rollout, make_trace, settings


def test_a_transition_takes_32_bytes_or_fewer() -> None:
    assert transition_bytes(settings("transitions")) == 31
    assert transition_bytes(settings("traces")) == 24
    seven = settings("transitions", features=FeatureConfig(TEXT_FEATURES))
    assert transition_bytes(seven) == 31 + 3 * 4, "four bytes a feature"


@pytest.mark.parametrize(("kind", "make"), [("transitions", make_rollout), ("traces", make_trace)])
def test_rows_take_what_is_said(kind: str, make: Any) -> None:
    records = [make(i) for i in range(5)]
    columns = stack(records, settings(kind))
    held = sum(columns[name].nbytes for name in row_columns(settings(kind)))
    assert held == row_bytes(settings(kind)) * sum(record.n_rows for record in records)
    assert row_bytes(settings("traces")) == 24 * N_LAYERS
