from __future__ import annotations

import pytest

from lede.collectors.prompt_queue import PromptQueue


def drained(queue: PromptQueue) -> list[int]:
    """Sizes of the groups that one worker would get."""
    sizes = []
    while queue.waiting:
        sizes.append(len(queue.take(0)))
        queue.done(0)
    assert queue.finished
    return sizes


def test_groups_are_shards_of_whole_batches_and_end_small() -> None:
    assert drained(PromptQueue(range(200), 2, 8, 32)) == [32, 32, 32, 24, 16, 16, 8, 8, 8, 8, 8, 8]
    assert drained(PromptQueue(range(20), 1, 8, 2)) == [8, 8, 4]  # a batch is never cut for a shard
    assert drained(PromptQueue(range(10), 4, 8, 32)) == [3, 3, 3, 1]  # nobody goes without
    assert drained(PromptQueue((), 2, 8, 32)) == []


def test_prompts_go_out_once_in_order() -> None:
    queue = PromptQueue([3, 5, 8, 9], 2, 1, 1)
    assert [queue.take(0), queue.take(1)] == [(3,), (5,)]
    with pytest.raises(ValueError, match=r"worker 1 still has prompts \[5\]"):
        queue.take(1)
    queue.done(1)
    assert (queue.take(1), queue.at_hand(0), queue.finished) == ((8,), (3,), False)


def test_what_a_dead_worker_had_comes_back_in_parts_behind_the_others() -> None:
    queue = PromptQueue(range(40), 1, 16, 16)
    assert queue.take(0) == tuple(range(16))
    assert queue.lost(0, "signal 9", {0, 1, 99}) == tuple(range(2, 16))
    assert queue.at_hand(0) == ()
    groups = []
    while queue.waiting:
        groups.append(queue.take(0))
        queue.done(0)
    assert groups == [tuple(range(16, 32)), tuple(range(32, 40)), *((i, i + 1) for i in range(2, 16, 2))]
    assert queue.finished
    assert queue.poison == {}


def test_a_worker_that_had_nothing_loses_nothing() -> None:
    queue = PromptQueue((), 1, 1, 1)
    assert queue.lost(0, "code 1", ()) == ()
    assert queue.take(0) == ()
    assert queue.lost(0, "code 1", ()) == ()
    assert queue.finished


@pytest.mark.parametrize(("n_prompts", "deaths"), [(1, 3), (8, 3), (32, 3), (256, 4)])
def test_a_prompt_that_kills_is_set_aside_after_few_deaths(n_prompts: int, deaths: int) -> None:
    queue, died, done = PromptQueue(range(n_prompts), 1, n_prompts, n_prompts), 0, 0
    while queue.waiting:
        group = queue.take(0)
        if n_prompts - 1 in group:
            died += 1
            queue.lost(0, f"signal {died}", ())
        else:
            done += len(group)
            queue.done(0)
    assert queue.poison == {n_prompts - 1: f"signal {deaths}"}
    assert (died, done, queue.finished) == (deaths, n_prompts - 1, True)
