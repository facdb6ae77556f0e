"""The learned policy: the same function as the network it was made from, and the same decisions."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lede.features import FeatureConfig
from lede.generation import generate
from lede.policies import ExitAt, LayerState, LearnedConfig, LearnedPolicy, PreScan, PreScanState
from lede.policies.base import Plan
from lede.policies.learned import QNetwork, fold_normalisation
from tests.tiny_models import plain_generate, prompt, tiny_model

torch.set_num_threads(1)

Layers = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def random_layers(*sizes: int, seed: int = 0) -> Layers:
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(n_out, n_in)) / np.sqrt(n_in), rng.normal(size=n_out) / 4) for n_in, n_out in pairwise(sizes)
    ]


def torch_values(layers: Layers, observations: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same network in torch and float64."""
    modules: list[torch.nn.Module] = []
    for weight, bias in layers:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        linear.weight.data, linear.bias.data = torch.tensor(weight), torch.tensor(bias)
        modules += [linear, torch.nn.ReLU()]
    with torch.no_grad():
        result: npt.NDArray[Any] = torch.nn.Sequential(*modules[:-1])(torch.tensor(observations)).numpy()
    return result


def decide(policy: LearnedPolicy, observations: npt.NDArray[Any]) -> list[bool]:
    rows = observations.astype(np.float32)
    scans = [policy.scan(LayerState(2, 0, row)) for row in rows]
    assert scans == [policy.draft(LayerState(2, 1, row)) for row in rows]
    return scans


def test_a_worked_network() -> None:
    """Q(EXIT) = relu(2 - entropy), Q(CONTINUE) = relu(depth - 0.25): exits when the entropy is low enough."""
    layers = [
        (np.array([[-1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -0.25])),
        (np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([0.0, 0.0])),
    ]
    policy = LearnedPolicy.from_network(layers, features=FeatureConfig(names=("entropy", "depth")))
    rows = np.array([[1.0, 0.5], [1.75, 0.5], [1.8, 0.5], [3.0, 0.5], [3.0, 0.1]])
    # (1.0 > .25), (.25 = .25: a tie continues), (.2 < .25), (0 < .25), (0 = 0: a tie continues)
    assert decide(policy, rows) == [True, False, False, False, False]
    assert policy.greedy(rows).tolist() == [1, 0, 0, 0, 0]
    np.testing.assert_allclose(policy.q_values(rows[0]), [0.25, 1.0])


@pytest.mark.parametrize("sizes", [(4, 2), (4, 8, 2), (4, 64, 64, 2), (4, 9, 17, 13, 2)])
def test_decisions_and_values_are_those_of_the_network(sizes: tuple[int, ...]) -> None:
    layers = random_layers(*sizes)
    policy = LearnedPolicy.from_network(layers)
    observations = np.random.default_rng(1).normal(size=(300, 4))
    values = torch_values(layers, observations)
    np.testing.assert_allclose(policy.q_values(observations), values, atol=2e-6)
    clear = np.abs(values[:, 1] - values[:, 0]) > 1e-5
    assert clear.mean() > 0.9
    wanted = values[:, 1] > values[:, 0]
    assert 0.02 < wanted.mean() < 0.98
    np.testing.assert_array_equal(np.array(decide(policy, observations))[clear], wanted[clear])
    np.testing.assert_array_equal(policy.greedy(observations)[clear], wanted[clear])


def test_normalisation_is_folded_into_the_first_layer() -> None:
    layers = random_layers(4, 16, 2)
    mean, std = np.array([3.0, 1.0, -2.0, 0.5]), np.array([2.0, 0.5, 4.0, 0.1])
    observations = np.random.default_rng(2).normal(size=(100, 4)) * std + mean
    policy = LearnedPolicy.from_network(layers, mean=mean, std=std)
    np.testing.assert_allclose(
        policy.q_values(observations), torch_values(layers, (observations - mean) / std), atol=2e-5
    )
    assert fold_normalisation(layers)[0][0] is layers[0][0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_decides_alike_and_shares_nothing(duplicate: Any) -> None:
    policy = LearnedPolicy.from_network(random_layers(4, 16, 16, 2))
    twin = duplicate(policy)
    observations = np.random.default_rng(3).normal(size=(200, 4))
    wanted = decide(policy, observations)
    assert len(set(wanted)) == 2
    policy.network.layers[0][0][:] = 0
    policy.network._weights[0][:] = 0
    assert decide(twin, observations) == wanted
    assert decide(policy, observations) != wanted


def test_the_callers_arrays_are_copied() -> None:
    layers = [(weight.astype(np.float32), bias.astype(np.float32)) for weight, bias in random_layers(4, 2)]
    policy = LearnedPolicy.from_network(layers)
    before = policy.q_values(np.ones(4))
    layers[0][0][:] = 0
    np.testing.assert_array_equal(policy.q_values(np.ones(4)), before)


def test_a_fingerprint_binds_and_makes_candidates_explicit() -> None:
    print_of: dict[str, Any] = {
        "name": "m",
        "architecture": {"n_layers": 16},
        "tokenizer": None,
        "logits": [],
        "dtype": "float32",
    }
    policy = LearnedPolicy.from_network(random_layers(4, 2), fingerprint=print_of)
    assert policy.bound
    assert policy.config.candidates == (2, 4, 6, 8)
    config = LearnedConfig(candidates=(3, 5), trained_temperature=0.0)
    policy = LearnedPolicy.from_network(random_layers(4, 2), config, fingerprint=print_of, max_draft=6)
    assert policy.config == LearnedConfig(candidates=(3, 5), trained_temperature=0.0, max_draft=6)
    with pytest.raises(ValueError, match=r"candidates \[3, 16\] must be ascending layers within 1..15"):
        LearnedPolicy.from_network(random_layers(4, 2), fingerprint=print_of, candidates=(3, 16))


STAGES = ("surprisal", "in_scan", "in_draft")
CANDIDATES = (1, 2, 4)


def with_plans(seed: int = 0, candidates: tuple[int, ...] | None = CANDIDATES) -> LearnedPolicy:
    layers = random_layers(3, 16, 5, seed=seed)
    return LearnedPolicy.from_network(layers, features=FeatureConfig(STAGES), candidates=candidates)


def before(observation: Any) -> PreScanState:
    return PreScanState(0.0, None, 0, 9, 9, np.asarray(observation, dtype=np.float32))


def test_plans_of_the_pre_scan() -> None:
    """Identity at the features: the values of the five actions are written into the observation."""
    names = ("entropy", "margin", "trace", "survival", "surprisal", "in_scan", "in_draft")
    layers = [(np.eye(5, 7), np.zeros(5))]
    policy = LearnedPolicy.from_network(layers, features=FeatureConfig(names), candidates=CANDIDATES)
    assert policy.decides_pre_scan
    plans = {
        (2, 1, 1, 1, 1): PreScan.SKIP,
        (1, 2, 1, 1, 1): PreScan.SCAN,
        (0, 1, 2, 1, 1): ExitAt(1),
        (0, 1, 1, 1, 2): ExitAt(4),
        (2, 2, 2, 2, 2): PreScan.SKIP,  # ties take the lowest action
        (1, 2, 2, 2, 2): PreScan.SCAN,
        (0, 0, 1, 1, 0): ExitAt(1),
    }
    for values, plan in plans.items():
        assert policy.pre_scan(before([*values, 0, 0])) == plan
        # the plans' values count for nothing in the other stages
        state = LayerState(2, 0, np.asarray([*values, 1, 0], dtype=np.float32))
        assert policy.scan(state) == policy.draft(state) == (values[1] > values[0])


def test_fixed_drafts_are_plans_behind_the_others(tmp_path: Path) -> None:
    names, drafts = ("entropy", "margin", "trace", "survival", "surprisal", "in_scan", "in_draft"), (ExitAt(4, 3),)
    settings: dict[str, Any] = {"features": FeatureConfig(names), "candidates": (1, 4), "fixed_drafts": drafts}
    policy = LearnedPolicy.from_network([(np.eye(5, 7), np.zeros(5))], **settings)
    assert policy.pre_scan(before([1, 1, 0, 0, 2, 0, 0])) == ExitAt(4, 3)
    assert policy.pre_scan(before([1, 1, 0, 2, 1, 0, 0])) == ExitAt(4)
    policy.save_pretrained(str(tmp_path))
    assert LearnedPolicy.from_pretrained(str(tmp_path)).config == policy.config
    for bad_drafts in ((ExitAt(4),), (ExitAt(4, 3), ExitAt(4, 3))):
        with pytest.raises(ValueError, match="must be distinct and have a length"):
            LearnedConfig(**{**settings, "fixed_drafts": bad_drafts})
    with pytest.raises(ValueError, match=r"fixed drafts must be at candidates, \[1, 4\]"):
        LearnedConfig(**{**settings, "fixed_drafts": (ExitAt(2, 3),)})
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        ExitAt(4, 0)
    with pytest.raises(ValueError, match="among 3 candidates, beside 1 fixed drafts, but they are"):
        LearnedPolicy.from_network(random_layers(7, 6), **settings)


def test_two_outputs_always_scan() -> None:
    policy = LearnedPolicy.from_network(random_layers(3, 8, 2), features=FeatureConfig(STAGES))
    assert not policy.decides_pre_scan
    assert policy.pre_scan(before([])) is PreScan.SCAN


@pytest.mark.parametrize(
    "policy", [with_plans(1), LearnedPolicy.from_network(random_layers(3, 16, 2), features=FeatureConfig(STAGES))]
)
def test_decisions_of_a_batch_are_the_single_ones(policy: LearnedPolicy) -> None:
    rng = np.random.default_rng(0)
    stage = rng.integers(3, size=600)
    observations = np.stack([rng.uniform(0, 9, 600), stage == 1, stage == 2], axis=1).astype(np.float32)
    numbers: dict[Plan, int] = {PreScan.SKIP: 0, PreScan.SCAN: 1}
    numbers.update({ExitAt(layer): 2 + k for k, layer in enumerate(CANDIDATES)})
    single = [
        numbers[policy.pre_scan(before(row))] if s == 0 else int(policy.scan(LayerState(2, 0, row)))
        for s, row in zip(stage, observations, strict=True)
    ]
    np.testing.assert_array_equal(policy.decide(observations), single)
    legal = np.ones((600, 5), dtype=np.bool_)
    legal[stage != 0, 2:] = False
    np.testing.assert_array_equal(policy.decide(observations, legal), single)
    if policy.decides_pre_scan:
        assert len(set(np.asarray(single)[stage == 0])) > 1
    legal[:, 0] = False
    masked = policy.decide(observations, legal)
    assert (masked != 0).all()
    assert (masked[stage != 0] == 1).all()


def test_a_batch_without_stages_goes_by_what_is_legal() -> None:
    policy = LearnedPolicy.from_network(random_layers(4, 16, 2))
    observations = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    np.testing.assert_array_equal(policy.decide(observations), policy.greedy(observations))
    legal = np.ones((200, 5), dtype=np.bool_)
    legal[100:, 2:] = False
    found = policy.decide(observations, legal)
    assert (found[:100] == 1).all()  # the pre-scan, which a network with two outputs doesn't decide
    np.testing.assert_array_equal(found[100:], policy.greedy(observations[100:]))
    with pytest.raises(ValueError, match="has 5 outputs, the legal actions are 6"):
        with_plans().decide(np.zeros((2, 3)), np.ones((2, 6), dtype=np.bool_))


def bad(layers: Layers, **changes: Any) -> Any:
    return lambda: LearnedPolicy.from_network(layers, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bad([]), "at least one layer"),
        (bad(random_layers(4, 1)), "last layer has 1 outputs, wanted at least 2"),
        (bad(random_layers(3, 2)), r"takes 3 features, the config names \['confidence', 'entropy', 'trace', 'depth'\]"),
        (bad([*random_layers(4, 8), *random_layers(7, 2)]), r"layer 1 has weight \(2, 7\) and bias \(2,\); \(out, 8\)"),
        (bad([(np.ones((2, 4)), np.ones(3))]), r"layer 0 has weight \(2, 4\) and bias \(3,\)"),
        (bad([(np.full((2, 4), np.nan), np.ones(2))]), "layer 0 of the Q-network holds numbers that are not finite"),
        (bad(random_layers(4, 5)), "decides the pre-scan among 3 candidates, but none are given"),
        (bad(random_layers(4, 5), candidates=(2, 3)), r"among 3 candidates, but they are \[2, 3\]"),
        (
            bad(random_layers(4, 4), candidates=(2, 3)),
            "must see the stage: in_scan and in_draft belong to its features",
        ),
        (bad(random_layers(4, 2), std=np.array([1.0, 0.0, 1.0, 1.0])), "std must be positive"),
        (bad(random_layers(4, 2), mean=np.zeros(3)), r"mean \(3,\) and std \(4,\)"),
    ],
)
def test_unfit_networks_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_observations_of_another_width_are_refused() -> None:
    policy = LearnedPolicy.from_network(random_layers(4, 2))
    with pytest.raises(ValueError, match=r"takes \(4,\) features, got \(1,\)"):
        policy.scan(LayerState(2, 0, np.ones(1, dtype=np.float32)))
    with pytest.raises(ValueError, match=r"takes \(..., 4\) features, got \(3, 5\)"):
        policy.q_values(np.ones((3, 5)))


def test_without_a_network_it_refuses_before_decoding() -> None:
    with pytest.raises(ValueError, match="has no network"):
        LearnedPolicy().check_model(tiny_model("llama"))


def test_an_observation_that_is_not_a_number_never_exits() -> None:
    network = QNetwork([(np.array([[0.0], [1.0]]), np.array([0.0, 100.0]))])
    assert not network.advantage(np.array([np.nan], dtype=np.float32)) > 0


def test_decoding_under_a_learned_policy_gives_the_plain_text() -> None:
    model, ids = tiny_model("qwen3"), prompt(1, 7)
    # exits under an entropy that rises with the depth; the tiny models' entropies are all within 4.843..4.848
    layers = [(np.array([[0.0, 0.0, 0.0, 0.0], [0.0, -1000.0, 0.0, 0.6]]), np.array([0.0, 4845.4]))]
    out = generate(model, input_ids=ids, policy=LearnedPolicy.from_network(layers), max_new_tokens=40)
    assert out.sequences[0, len(ids) :].tolist() == plain_generate(model, ids, 40)
    assert out.stats.drafted > 0
    assert len({r.exit_layer for r in out.rounds}) > 1
