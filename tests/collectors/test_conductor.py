from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lede.collectors import CollectProgress, WorkerError
from lede.collectors.conductor import Conductor
from lede.collectors.crew import Event, Failed
from lede.collectors.prompt_queue import PromptQueue
from lede.collectors.sitting import Sitting
from tests.collectors.fake_crew import FakeCrew


class Run:
    """A conductor over a fake crew, and what came of it."""

    def __init__(self, crew: FakeCrew, n_prompts: int = 20, batch_size: int = 2, shard_prompts: int = 4) -> None:
        self.crew = crew
        self.sitting = FakeSitting(crew)
        self.console = Console(file=io.StringIO(), width=500)
        self.progress = CollectProgress(n_prompts, 0, Console(file=io.StringIO()))
        queue = PromptQueue(range(n_prompts), crew.size, batch_size, shard_prompts)
        self.conductor = Conductor(crew, queue, self.sitting, self.progress, self.console)

    def __call__(self) -> Run:
        self.conductor.run()
        return self

    @property
    def said(self) -> list[str]:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue().splitlines()


class FakeSitting(Sitting):
    """Knows the store of a fake crew."""

    def __init__(self, crew: FakeCrew) -> None:
        self.store = "runs/a.zarr"
        self.commits = 0
        self.committed = lambda: frozenset(crew.store)  # type: ignore[method-assign]

    def write_seconds(self) -> None:
        self.commits += 1


def dies_at(*deaths: int, commits: int = 0) -> Callable[[int, tuple[int, ...]], int | None]:
    """A fate that kills at these steps of the crew, counted from 0, starts among them."""
    steps = iter(range(10**6))
    return lambda worker, group: min(commits, len(group)) if next(steps) in deaths else None


def kills(*poison: int) -> Callable[[int, tuple[int, ...]], int | None]:
    """A fate in which prompts kill whoever has them."""
    return lambda worker, group: 0 if set(poison) & set(group) else None


def test_all_prompts_are_shared_out_and_counted() -> None:
    run = Run(FakeCrew(3))()
    assert run.crew.store == dict.fromkeys(range(20), 1)
    assert {worker for worker, _ in run.crew.groups} == {0, 1, 2}
    assert (run.progress.done, run.progress.n_tokens, run.sitting.commits) == (20, 60, len(run.crew.groups))
    assert (run.crew.starts, run.crew.ended, run.said) == ([0, 1, 2], ["stop", "kill"], [])


def test_nothing_to_do_still_lets_a_worker_check_the_settings() -> None:
    run = Run(FakeCrew(1), n_prompts=0)()
    assert (run.crew.starts, run.crew.groups, run.crew.ended) == ([0], [], ["stop", "kill"])
    assert Run(FakeCrew(1, dies_at(0, 1)), n_prompts=0)().crew.starts == [0, 0, 0]  # until one has checked them


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 4),
    n_prompts=st.integers(1, 60),
    shard=st.integers(1, 16),
    deaths=st.sets(st.integers(0, 40), max_size=2),  # a third might be held against a prompt
    commits=st.integers(0, 3),
)
def test_two_deaths_at_any_step_change_nothing(
    size: int, n_prompts: int, shard: int, deaths: set[int], commits: int
) -> None:
    crew = FakeCrew(size, dies_at(*deaths, commits=commits))
    run = Run(crew, n_prompts, 2, shard)()
    assert crew.store == dict.fromkeys(range(n_prompts), 1)
    assert run.progress.done == n_prompts
    assert len(run.said) <= len(deaths)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_any_number_of_deaths_is_survived_where_something_was_committed(every: int) -> None:
    groups = iter(range(1, 10**4))
    crew = FakeCrew(3, lambda worker, group: 1 if group and next(groups) % every == 0 else None)
    run = Run(crew, 100, 2, 16)()
    assert crew.store == dict.fromkeys(range(100), 1)
    assert run.progress.done == 100
    assert len(run.said) > 5
    assert len(crew.starts) > 5


def test_the_dead_are_told_of_and_replaced() -> None:
    run = Run(FakeCrew(2, dies_at(2, commits=1)))()
    assert run.crew.starts == [0, 1, 0]
    assert run.said == ["worker 0 ended with signal 9 (SIGKILL); prompts to redo: 1, 2, 3"]
    assert run.crew.store == dict.fromkeys(range(20), 1)


def test_whoever_waits_takes_over_from_the_dead() -> None:
    # 4 prompts: worker 0 has none left when worker 1 dies, and no third worker is started for one group
    run = Run(FakeCrew(2, dies_at(5)), n_prompts=4, batch_size=1, shard_prompts=1)()
    assert run.crew.store == dict.fromkeys(range(4), 1)
    assert run.crew.starts == [0, 1]
    assert len(run.said) == 1


def test_poison_is_named_when_all_others_are_done() -> None:
    run = Run(FakeCrew(2, kills(7, 11)))
    with pytest.raises(WorkerError, match=r"prompts 7, 11 \(counted from 0\) ended each worker .*SIGKILL"):
        run()
    assert run.crew.store == dict.fromkeys(set(range(20)) - {7, 11}, 1)
    assert run.progress.done == 18
    assert len(run.said) == 6  # three deaths each
    assert [line.split("; ")[1] for line in run.said][-2:] == ["prompts set aside: 7", "prompts set aside: 11"]
    assert run.crew.ended == ["stop", "kill"]
    with pytest.raises(WorkerError, match=r"prompt 0 \(counted from 0\) ended each worker that got hold of it"):
        Run(FakeCrew(1, kills(0)), n_prompts=1)()


def test_workers_that_cannot_start_end_it() -> None:
    run = Run(FakeCrew(2, lambda worker, group: None if group else 0))
    with pytest.raises(WorkerError, match=r"3 workers ended one after another while they loaded .*SIGKILL"):
        run()
    assert (run.crew.starts, run.crew.groups, run.crew.ended) == ([0, 1, 0, 1], [], ["stop", "kill"])


def test_some_that_cannot_start_do_not() -> None:
    run = Run(FakeCrew(2, dies_at(0, 2)))()  # worker 0 at its first and second start
    assert run.crew.starts == [0, 1, 0, 0]
    assert run.crew.store == dict.fromkeys(range(20), 1)


def test_deaths_in_vain_end_it_with_the_prompts_at_hand() -> None:
    run = Run(FakeCrew(2, lambda worker, group: 0 if group else None), n_prompts=200, shard_prompts=32)
    with pytest.raises(WorkerError, match=r"10 workers ended one after another and nothing was .* at prompts \d+, "):
        run()
    assert run.crew.store == {}
    assert run.progress.done == 0


class TellingCrew(FakeCrew):
    """Its workers tell something else at a step."""

    def __init__(self, step: int, tell: Callable[[], Event], at_stop: BaseException | None = None) -> None:
        super().__init__(2)
        self._step, self._tell, self._at_stop = step, tell, at_stop

    def events(self) -> Any:
        self._step -= 1
        if self._step < 0:
            return iter([self._tell()])
        return super().events()

    def stop(self) -> None:
        super().stop()
        if self._at_stop is not None:
            raise self._at_stop


def interrupt() -> Event:
    raise KeyboardInterrupt


def test_what_a_worker_met_is_raised_on() -> None:
    run = Run(TellingCrew(4, lambda: Failed(1, ValueError("seed: 0 / 1"))))
    with pytest.raises(ValueError, match="seed: 0 / 1"):
        run()
    assert run.crew.ended == ["stop", "kill"]
    assert len(run.crew.store) > 0


def test_ctrl_c_lets_the_workers_commit_and_a_second_one_ends_them() -> None:
    run = Run(TellingCrew(4, interrupt))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run.crew.ended == ["stop", "kill"]
    run = Run(TellingCrew(4, interrupt, at_stop=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run.crew.ended == ["stop", "kill"]


def test_commits_that_do_not_show_here_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lede.collectors.conductor.SHOWS_WITHIN", 0.0)
    run = Run(FakeCrew(2))
    run.sitting.committed = frozenset  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match=r"committed prompts 0, 1, 2, 3, which don't show in runs/a\.zarr here"):
        run()
    assert run.crew.ended == ["stop", "kill"]


def test_a_shared_folder_may_show_them_late(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("lede.collectors.conductor.time.sleep", slept.append)
    run = Run(FakeCrew(1))
    run.sitting.committed = lambda: frozenset(run.crew.store) if slept else frozenset()  # type: ignore[method-assign]
    run()
    assert len(slept) == 1
    assert run.progress.done == 20
