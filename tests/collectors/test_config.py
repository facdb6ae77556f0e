from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from lede.cli import main
from lede.collectors import CollectConfig, collect
from lede.collectors.sitting import Sitting
from lede.stopwatch import Stopwatch
from tests.tiny_models import prompt, tiny_model


@pytest.mark.parametrize(
    ("words", "ray", "workers", "alone"),
    [
        ("", None, None, True),
        ("--workers 1", None, 1, True),
        ("--workers 2", None, 2, False),
        ("--ray", "", None, False),
        ("--ray 10.0.0.1:6379 --workers 1", "10.0.0.1:6379", 1, False),
        ("--ray --workers 3", "", 3, False),
    ],
)
def test_workers_and_an_address_that_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, words: str, ray: str | None, workers: int | None, alone: bool
) -> None:
    seen: list[CollectConfig] = []
    monkeypatch.setattr("lede.collectors.collect", seen.append)
    assert main(["collect", *words.split(), "--out", "a.zarr"]) == 0
    (config,) = seen
    assert (config.ray, config.workers, config.alone, config.out) == (ray, workers, alone, Path("a.zarr"))


def test_two_addresses_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "--out", "a.zarr", "--ray", "a:1", "b:2"]) == 2
    assert "--ray takes one address at most, got a:1 b:2" in capsys.readouterr().err


def test_a_sitting_knows_the_store_and_keeps_the_time_in_folders(tmp_path: Path) -> None:
    for out in (tmp_path / "a", Path(f"file://{tmp_path}/b"), Path("memory://test_config/c")):
        sitting = Sitting(out)
        assert sitting.committed() == frozenset()
        config = CollectConfig(out, max_new_tokens=2, candidates="1", episodes=1)
        collect(config, tiny_model("llama"), [prompt(0, 4), prompt(1, 4)])
        assert sitting.committed() == {0}
        assert sitting.store == str(out).replace(":/", "://" if "memory" in str(out) else ":///")
    assert [(tmp_path / name / "seconds.json").exists() for name in "ab"] == [True, True]
    assert not Path("memory:").exists()
    (tmp_path / "a" / "seconds.json").unlink()
    Sitting(tmp_path / "a").end()  # nothing was collected in it
    assert not (tmp_path / "a" / "seconds.json").exists()


def test_seconds_that_can_not_be_written_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the shard that could not be written is what there is to tell."""

    def refuse(self: Stopwatch) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Stopwatch, "write", refuse)
    out = tmp_path / "s"
    collect(CollectConfig(out, max_new_tokens=2, candidates="1", shard_prompts=1), tiny_model("llama"), [prompt(0, 4)])
    assert Sitting(out).committed() == {0}


def test_an_interruption_names_the_store_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Sitting(Path("[/b]of[red]a.zarr")).tell_interrupted(Console())
    assert capsys.readouterr().out.startswith("interrupted; 0 prompts are safe in [/b]of[red]a.zarr; the same")
