"""The loop for many texts: who is asked when, the work that is done, the law of sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lede.batch_decoding import BatchDecoder
from lede.batch_row import BatchRow
from lede.features import FeatureConfig
from lede.models import Block, EarlyExitModel, load_model
from lede.policies import Policy, RandomPolicy, StaticPolicy
from lede.policies.base import LayerState, PreScan, PreScanState
from lede.seeding import Purpose, torch_stream
from lede.verification import Chooser, TorchSource, Warp
from tests.table_model import Law, Paths, TableCache, TableModel, distance, law_of_model
from tests.tiny_models import N_LAYERS, prompt, tiny_hf_model, tiny_model

ROWS = [prompt(seed, length) for seed, length in ((0, 5), (1, 11), (2, 2))]
BUDGETS = (30, 12, 24)


class SpiedChooser(Chooser):
    """Tells when it draws for a draft."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(Warp(1.0), TorchSource(torch_stream(0, Purpose.TOKENS)))
        self.log = log

    def choose(self, *args: Any) -> Any:
        self.log.append("draw")
        return super().choose(*args)

    def verify(self, *args: Any) -> Any:
        self.log.append("verify")
        return super().verify(*args)


class SpiedPolicy(RandomPolicy):
    """Tells when it decides."""

    log: list[str]

    @property
    def features(self) -> FeatureConfig:
        return FeatureConfig()

    def pre_scan(self, state: PreScanState) -> Any:
        self.log.append("decide")
        return super().pre_scan(state)

    def scan(self, state: LayerState) -> bool:
        self.log.append("decide")
        return super().scan(state)

    def draft(self, state: LayerState) -> bool:
        self.log.append("decide")
        return super().draft(state)


@pytest.mark.parametrize("seed", range(4))
def test_all_rows_are_asked_before_any_draws(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins where tokens are embedded; decisions first, then draws, then at most verification."""
    model = tiny_model("llama")
    log: list[str] = []
    own = EarlyExitModel.embed

    def embed(model: EarlyExitModel, *args: Any) -> Any:
        log.append("step")
        return own(model, *args)

    monkeypatch.setattr(EarlyExitModel, "embed", embed)
    policy = SpiedPolicy(seed=seed)
    policy.log = log
    policy.check_model(model)
    rows = [BatchRow(i, ids, n, SpiedChooser(log)) for i, (ids, n) in enumerate(zip(ROWS, BUDGETS, strict=True))]
    for _ in BatchDecoder(model, policy, rows).decode():
        pass
    assert [len(row.new) for row in rows] == list(BUDGETS)
    steps = " ".join(log).split("step")
    order = {"decide": 0, "draw": 1, "verify": 2}
    mixed = 0
    for step in steps[2:]:  # the first is empty, the second the prefill
        events = step.split()
        if "verify" in events:  # behind it, the next round's pre-scan
            last = len(events) - events[::-1].index("verify")
            assert set(events[last:]) <= {"decide"}
            events = events[:last]
        assert events == sorted(events, key=order.__getitem__), events
        mixed += "decide" in events and events.count("draw") > 1
    assert mixed > 5  # steps where one row's draw could have come before another's decision


@pytest.mark.parametrize(
    "policy",
    [None, StaticPolicy(exit_layer=2, draft_length=4), RandomPolicy(seed=1), RandomPolicy(seed=2)],
    ids=["plain", "static", "random 1", "random 2"],
)
def test_each_layer_sees_each_position_of_each_row_once_a_round(
    policy: Policy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt once, drafted and corrections once, nothing redone; padding apart."""
    model = load_model((tiny_hf_model("llama"), None))
    if policy is not None:
        policy.check_model(model)
    rows = [
        BatchRow(i, ids, n, Chooser(Warp(), TorchSource(torch.Generator())))
        for i, (ids, n) in enumerate(zip(ROWS, BUDGETS, strict=True))
    ]
    decoder = BatchDecoder(model, policy, rows)
    seen: list[list[Counter[int]]] = [[Counter() for _ in range(N_LAYERS)] for _ in rows]
    placed: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}
    blocks: list[Block] = []  # kept, so that no two have one id
    own_block, own_run = EarlyExitModel.rows_block, EarlyExitModel.run_layers

    def rows_block(model: EarlyExitModel, cache: Any, *where: Any) -> Block:
        blocks.append(own_block(model, cache, *where))
        placed[id(blocks[-1])] = where
        return blocks[-1]

    def run_layers(model: EarlyExitModel, hidden: torch.Tensor, first: int, last: int, block: Block) -> torch.Tensor:
        for place, start, length in zip(*placed[id(block)], strict=True):
            number = next(row.number for row in rows if row.place == place and (not row.done or not row.rounds))
            for layer in range(first, last):
                seen[number][layer].update(range(start, start + length))
        assert hidden.shape[:2] == (len(placed[id(block)][0]), max(placed[id(block)][2]))
        return own_run(model, hidden, first, last, block)

    monkeypatch.setattr(EarlyExitModel, "rows_block", rows_block)
    monkeypatch.setattr(EarlyExitModel, "run_layers", run_layers)
    for _ in decoder.decode():
        pass
    for row, counted in zip(rows, seen, strict=True):
        wanted: Counter[int] = Counter(range(row.n_prompt))
        start = row.n_prompt
        for r in row.rounds:
            wanted.update(range(start, start + 1 + r.drafted))
            start += len(r.tokens)
        assert counted == [wanted] * N_LAYERS


def test_a_pass_takes_all_rows_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding of a batch runs each layer as often as the longest text alone would."""
    model = load_model((tiny_hf_model("llama"), None))
    widths: list[int] = []
    hook = model.hf_model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[0]))
    rows = [
        BatchRow(i, ids, n, Chooser(Warp(), TorchSource(torch.Generator())))
        for i, (ids, n) in enumerate(zip(ROWS, BUDGETS, strict=True))
    ]
    for _ in BatchDecoder(model, None, rows).decode():
        pass
    hook.remove()
    assert widths == [3] + [3] * (BUDGETS[1] - 1) + [2] * (BUDGETS[2] - BUDGETS[1]) + [1] * (BUDGETS[0] - BUDGETS[2])


def test_rows_go_together_in_the_order_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or rows that are neighbours would be copied; also when they left the scan at layers in another order."""
    seen: list[list[int]] = []
    own = EarlyExitModel.rows_block

    def rows_block(model: EarlyExitModel, cache: Any, rows: list[int], *where: Any) -> Block:
        seen.append(list(rows))
        return own(model, cache, rows, *where)

    monkeypatch.setattr(EarlyExitModel, "rows_block", rows_block)
    model, policy = tiny_model("llama"), RandomPolicy(seed=3)
    policy.check_model(model)
    rows = [
        BatchRow(i, ids, n, Chooser(Warp(), TorchSource(torch.Generator())))
        for i, (ids, n) in enumerate(zip(ROWS, BUDGETS, strict=True))
    ]
    for _ in BatchDecoder(model, policy, rows).decode():
        pass
    assert all(places == sorted(places) for places in seen)
    assert {len(places) for places in seen} == {1, 2, 3}


class TableBatch:
    """Caches of a batch of table rows."""

    def __init__(self, n_rows: int) -> None:
        self.rows = [TableCache() for _ in range(n_rows)]

    def move_row(self, source: int, target: int, length: int) -> None:
        self.rows[target].tokens = dict(self.rows[source].tokens)
        self.rows[target].lengths = list(self.rows[source].lengths)


class TableRows(TableModel):
    """The table model for many rows."""

    def new_cache(self, capacity: int, n_rows: int = 1) -> Any:
        return TableBatch(n_rows)

    def rows_block(self, cache: TableBatch, rows: list[int], starts: list[int], lengths: list[int]) -> Any:
        return [(cache.rows[row], start, length) for row, start, length in zip(rows, starts, lengths, strict=True)]

    def embed(self, token_ids: torch.Tensor, block: Any) -> torch.Tensor:
        states: list[list[list[float]]] = []
        for (cache, start, _), tokens in zip(block, token_ids.tolist(), strict=True):
            states.append([])
            for i, token in enumerate(tokens):
                cache.tokens[start + i] = token
                code = 1
                for position in range(start + i + 1):
                    code = code * 4 + cache.tokens[position]
                states[-1].append([float(code), 0.0])
        return torch.tensor(states, dtype=torch.float64)

    def run_layers(self, hidden: torch.Tensor, first: int, last: int, block: Any) -> torch.Tensor:
        assert (hidden[..., 1] == first).all(), "layers were left out or run twice"
        for cache, start, length in block:
            for layer in range(first, last):
                assert cache.lengths[layer] >= start, "the cache has a gap"
                cache.lengths[layer] = start + length
        hidden = hidden.clone()
        hidden[..., 1] = last
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [[self._lookup(int(code), int(layer)) for code, layer in row] for row in hidden.tolist()]
        return torch.stack([torch.stack(row) for row in rows])


class ByEntropy(Policy):
    """Plan, layer and stop depend on the very distributions that tokens are drawn from, and on what came before."""

    kind = "by-entropy"

    def __init__(self) -> None:
        super().__init__(candidates=(1, 2))

    @property
    def features(self) -> FeatureConfig:
        return FeatureConfig(("entropy", "trace"), top_k=2)

    def pre_scan(self, state: PreScanState) -> PreScan:
        return PreScan.SKIP if state.trace > 1.25 else PreScan.SCAN

    def scan(self, state: LayerState) -> bool:
        return bool(state.observation[0] < 1.1) or state.layer == 2

    def draft(self, state: LayerState) -> bool:
        return bool(state.observation[0] + 0.1 * state.observation[1] < 1.15)


class Dropping(BatchDecoder):
    """Drops a drafted token that it does not like: breaks condition 3 of `lede.verification`."""

    def _draft_on(self, rows: list[BatchRow]) -> list[BatchRow]:
        on = super()._draft_on(rows)
        for row in on:
            if row.draft.tokens[-1] < 2:
                del row.draft.tokens[-1], row.draft.distributions[-1]
        return [row for row in on if len(row.draft.tokens) == len(row.draft.states)]


def law_of_row(number: int, make_policy: Any, warp: Warp, n_tokens: int, decoder_class: type[BatchDecoder]) -> Law:
    """The law of one row's text, whose prompt is (0, 1), while the others' luck is given."""
    model, paths = TableRows(seed=1), Paths()
    law: Law = {}
    prompts: list[tuple[int, ...]] = [(3,), (2, 2, 1)]
    prompts.insert(number, (0, 1))
    for _ in paths:
        rows = []
        for i, ids in enumerate(prompts):
            source = paths if i == number else TorchSource(torch_stream(9, Purpose.TOKENS, i))
            rows.append(BatchRow(i, ids, n_tokens if i == number else 3, Chooser(warp, source)))
        for _ in decoder_class(model, make_policy(), rows).decode():  # type: ignore[arg-type]
            pass
        text = tuple(rows[number].new)
        law[text] = law.get(text, 0.0) + paths.weight
    return law


POLICIES: dict[str, Any] = {
    "plain": lambda: None,
    "entropy": ByEntropy,
    "static": lambda: StaticPolicy(exit_layer=1, draft_length=3),
    "random": lambda: RandomPolicy(seed=0, candidates=(1, 2)),
}


@pytest.mark.parametrize(
    ("warp", "n_tokens"), [(Warp(1.0), 3), (Warp(0.7, top_k=2), 4), (Warp(1.5, top_p=0.6), 4)], ids=str
)
@pytest.mark.parametrize("name", POLICIES)
def test_law_of_a_row_is_the_whole_models(name: str, warp: Warp, n_tokens: int) -> None:
    """Every path of a row's luck, in the midst of others; with 4 tokens there is room for drafts of 2."""
    found = law_of_row(1, POLICIES[name], warp, n_tokens, BatchDecoder)
    assert distance(found, law_of_model(TableModel(seed=1), warp, n_tokens)) < 2e-6


def test_negative_control_a_drawn_token_that_is_not_submitted_is_caught() -> None:
    warp = Warp(0.7, top_k=2)
    found = law_of_row(1, POLICIES["static"], warp, 4, Dropping)
    assert distance(found, law_of_model(TableModel(seed=1), warp, 4)) > 1e-3
