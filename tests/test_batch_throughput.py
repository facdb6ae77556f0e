"""The script that measures batches."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.batch_throughput import Cell, ThroughputConfig, main, measure, table
from tests.tiny_models import prompt, tiny_model


def test_every_cell_writes_the_texts_of_single_calls() -> None:
    config = ThroughputConfig(policy="static:exit_layer=3;draft_length=3", max_new_tokens=6, repeats=2)
    cells = measure(tiny_model("llama"), [prompt(0, 4), prompt(1, 9)], config)
    assert [(cell.policy, cell.how) for cell in cells] == [
        ("plain", "loop"),
        ("plain", "lede"),
        ("plain", "transformers"),
        (config.policy, "loop"),
        (config.policy, "lede"),
    ]
    assert {(cell.batch_size, cell.tokens, len(cell.seconds), cell.equal_rows) for cell in cells} == {(2, 12, 2, 2)}
    assert min(min(cell.seconds) for cell in cells) > 0


def test_table_compares_medians() -> None:
    def cell(policy: str, how: str, *seconds: float) -> Cell:
        return Cell(4, policy, how, 100, seconds, 4)

    cells = [
        cell("plain", "loop", 9.0, 10.0, 99.0),
        cell("plain", "lede", 4.0),
        cell("plain", "transformers", 5.0),
        cell("static", "loop", 8.0),
        cell("static", "lede", 2.0),
    ]
    text = io.StringIO()
    Console(file=text, width=100).print(table(cells))
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    assert rows[0] == ["4", "plain", "loop", "10.0", "1.00", "0.50", "4/4"]
    assert rows[2] == ["4", "plain", "transformers", "20.0", "2.00", "1.00", "4/4"]
    assert rows[4] == ["4", "static", "lede", "50.0", "4.00", "2.50", "4/4"]


def test_the_script_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nimport os\n")
    out = tmp_path / "runs" / "batch.json"
    main(ThroughputConfig(prompts=prompts, batch_sizes=(3,), max_new_tokens=2, repeats=1, out=out))
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["settings"]["batch_sizes"] == [3]
    assert len(record["cells"]) == 5
    assert record["environment"]
    assert "tokens/s" in capsys.readouterr().out
