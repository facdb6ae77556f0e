"""Decoding with a memory of other texts, sound or garbage: exact, lawful, bound to its tokenizer, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lede.checkpoint import load_policy
from lede.generation import generate
from lede.lookup import LookupConfig
from lede.phrases import PhraseMemory
from lede.policies import LookupPolicy, Policy, RandomPolicy, parse_policy
from lede.policies.base import LayerState, Lookup, Plan, PreScan, PreScanState
from lede.verification import Warp
from tests.table_model import TableModel, distance, law_of_loop, law_of_model
from tests.tiny_models import plain_generate, prompt, tiny_model

BUDGET = 20
ROWS = [prompt(seed, length) for seed, length in ((0, 5), (1, 17), (2, 2))]


class Mixed(Policy):
    """Copies, prunes, scans and skips in turn."""

    kind = "mixed"

    @property
    def lookup(self) -> LookupConfig:
        return LookupConfig(4)

    def pre_scan(self, state: PreScanState) -> Plan:
        plans = (Lookup(6), PreScan.SCAN, Lookup(16, prune_at=3), PreScan.SKIP, Lookup(3))
        return plans[state.n_tokens % len(plans)]

    def scan(self, state: LayerState) -> bool:
        return state.layer == 2

    def draft(self, state: LayerState) -> bool:
        return state.n_drafted < 3


@cache
def sound(family: str) -> PhraseMemory:
    """Of the very texts, but for every fifth token, so that drafts go wrong somewhere."""
    model, texts = tiny_model(family), []
    for row in ROWS:
        answer = np.asarray(plain_generate(model, row, BUDGET))
        answer[4::5] = (answer[4::5] + 1) % model.vocab_size
        texts.append((row, answer))
    return PhraseMemory.from_texts(texts)


def garbage(family: str) -> PhraseMemory:
    """Something behind every token, and hardly anything right."""
    n = tiny_model(family).vocab_size
    rng = np.random.default_rng(0)
    return PhraseMemory.from_texts([((), np.concatenate([rng.permutation(n) for _ in range(4)]))])


MORE = [("gpt2", sound), ("gpt2", garbage), ("gpt_neox", sound), ("mistral", sound)]

POLICIES: dict[str, Callable[[], Policy]] = {
    "lookup": lambda: LookupPolicy(draft_length=6),
    "pruned lookup": lambda: LookupPolicy(draft_length=9, max_suffix=2, prune_at=4),
    "mixed": lambda: Mixed(candidates=(1, 2)),
    "random": lambda: RandomPolicy(seed=1, lookup_probability=0.6),
}


@pytest.mark.parametrize(
    ("family", "memory"),
    [("llama", sound), ("llama", garbage), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_texts_are_the_plain_model_s_one_by_one_and_in_a_batch(
    family: str, memory: Callable[[str], PhraseMemory]
) -> None:
    model = tiny_model(family)
    wanted = [plain_generate(model, row, BUDGET) for row in ROWS]
    drafted = accepted = 0
    for make in POLICIES.values():
        policy = make()
        policy.memory = memory(family)
        single = [generate(model, input_ids=row, policy=policy, max_new_tokens=BUDGET) for row in ROWS]
        policy.reset()
        batch = generate(model, input_ids=ROWS, policy=policy, max_new_tokens=BUDGET)
        for outputs in (single, batch):
            assert [out.sequences[0, len(row) :].tolist() for out, row in zip(outputs, ROWS, strict=True)] == wanted
        for out, other in zip(single, batch, strict=True):
            if policy.kind != "random":  # whose luck is shared among the rows
                assert [r.drafted for r in out.rounds] == [r.drafted for r in other.rounds]
            drafted += sum(r.drafted for r in out.rounds if r.source == "lookup")
            accepted += sum(r.accepted for r in out.rounds if r.source == "lookup")
    assert drafted > 60
    assert accepted / drafted > 0.25 if memory is sound else accepted / drafted < 0.25


@pytest.mark.parametrize("warp", [Warp(1.0), Warp(0.7, top_k=3, top_p=0.9)], ids=["T=1", "warped"])
@pytest.mark.parametrize("name", ["lookup", "pruned", "random"])
def test_the_law_of_sampling_is_the_whole_model_s(name: str, warp: Warp) -> None:
    model, rng = TableModel(seed=1), np.random.default_rng(3)
    memory = PhraseMemory.from_texts([((), rng.integers(4, size=40))], 2)

    def make() -> Policy:
        policy: Policy = LookupPolicy(draft_length=3, prune_at=2 if name == "pruned" else None)
        if name == "random":
            policy = RandomPolicy(seed=0, candidates=(1, 2), skip_probability=0.05, lookup_probability=0.7)
            policy._layers = (1, 2)
        policy.memory = memory
        return policy

    assert distance(law_of_loop(model, make, warp, 4), law_of_model(model, warp, 4)) < 2e-6


def test_a_memory_drafts_where_the_text_is_new(tmp_path: Path) -> None:
    model = tiny_model("llama")
    sound("llama").save(tmp_path / "m.safetensors")
    policy = parse_policy(f"lookup:draft_length=4;memory={tmp_path / 'm.safetensors'}")
    assert isinstance(policy, LookupPolicy)
    rounds, bare = (
        generate(model, input_ids=ROWS[1], policy=each, max_new_tokens=BUDGET).rounds
        for each in (policy, LookupPolicy(draft_length=4))
    )
    assert len(rounds) < 0.8 * len(bare)
    # the folder has the memory, wherever the file is by then
    policy.bind(model).save_pretrained(str(tmp_path / "policy"))
    (tmp_path / "m.safetensors").unlink()
    assert "publish it as you would publish these" in (tmp_path / "policy" / "README.md").read_text()
    again = load_policy(tmp_path / "policy", model)
    assert isinstance(again, LookupPolicy)
    assert again.memory is not None
    assert again.memory.digest == sound("llama").digest
    assert again.config.memory is None
    out = generate(model, input_ids=ROWS[1], policy=again, max_new_tokens=BUDGET)
    assert [r.drafted for r in out.rounds] == [r.drafted for r in rounds]


def test_a_folder_whose_memory_is_lost_or_damaged_is_refused(tmp_path: Path) -> None:
    policy = LookupPolicy()
    policy.memory = sound("llama")
    policy.save_pretrained(str(tmp_path))
    path = tmp_path / "memory.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"damaged: memory\.safetensors is not the file that config\.json"):
        load_policy(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"damaged: memory\.safetensors is missing"):
        load_policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["memory_sha256"]  # as older versions wrote it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_policy(tmp_path).memory is None


def test_a_memory_that_is_not_the_model_s_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    foreign = PhraseMemory.from_texts([((), (1, model.vocab_size + 3, 2))])
    for make in POLICIES.values():
        policy = make()
        policy.memory = foreign
        with pytest.raises(ValueError, match=f"holds token {model.vocab_size + 3}"):
            generate(model, input_ids=[1, 2], policy=policy, max_new_tokens=4)
    with pytest.raises(ValueError, match="policy 'lookup': cannot read a memory of phrases"):
        parse_policy(f"lookup:memory={tmp_path / 'nothing'}")
