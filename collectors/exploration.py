"""Who acts in a rollout: uniform over exit layers, or a policy with epsilon-greedy exploration.

Exploration is decided a token at a time, not a candidate at a time: a coin flipped at every candidate would hardly ever
reach the deep ones.
"""

from __future__ import annotations

import hashlib
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.envs import Decision, Row, Rules
from lede.features import RECENT_ROUNDS, FeatureConfig
from lede.models import EarlyExitModel
from lede.policies import ExitAt, LayerSkippingPolicy, LayerState, Lookup, Policy, PreScan, PreScanState, SkipSublayers
from lede.policies.online import learns_online
from lede.rewards import CONTINUE, EXIT
from lede.seeding import Purpose, numpy_stream

NO_EXIT = 0
"""The plan of a token that goes through all candidates."""


class Actor:
    """Acts for one prompt.

    Args:
        explorer: What all prompts have in common.
        policy: This prompt's own copy of the policy; None explores at every token.
        epsilon: Probability that a token is explored.
        rng: This prompt's stream.
    """

    def __init__(self, explorer: Explorer, policy: Policy | None, epsilon: float, rng: np.random.Generator) -> None:
        self.policy = policy
        self.epsilon = epsilon
        self._explorer = explorer
        self._rng = rng
        self._plan: int | None = NO_EXIT  # exit layer of the token; None leaves it to the policy's scan
        self._recent: list[int] = []
        self._since_draft = 0

    def act(self, row: Row, layer: int) -> int:
        """CONTINUE or EXIT for a row that stands at this candidate layer."""
        if row.candidate == 0:
            self._plan = self._begin(row)
        if self._plan is not None:
            return EXIT if layer == self._plan else CONTINUE
        assert self.policy is not None
        if layer not in self._explorer.policy_candidates:
            return CONTINUE
        return EXIT if self.policy.scan(LayerState(layer, 0, self._explorer.observe(row, layer))) else CONTINUE

    def learn(self, decision: Decision) -> None:
        """Take note of what a decision came to; a token is a round that drafted one token, or none."""
        if decision.action == EXIT:
            self._recent = [*self._recent, decision.match][-RECENT_ROUNDS:]
            self._since_draft = 0
        elif decision.token_end:
            self._since_draft += 1

    def _begin(self, row: Row) -> int | None:
        candidates = self._explorer.rules.candidates
        if self.policy is None or self._rng.random() < self.epsilon:
            return (NO_EXIT, *candidates)[self._rng.integers(len(candidates) + 1)]
        acceptance = sum(self._recent) / len(self._recent) if self._recent else None
        n_tokens = len(row.prompt_ids) + len(row.token_ids)
        remaining = self._explorer.rules.max_new_tokens - len(row.token_ids)
        answer = self.policy.pre_scan(
            PreScanState(row.trace.value(), acceptance, self._since_draft, remaining, n_tokens)
        )
        if isinstance(answer, (ExitAt, SkipSublayers, Lookup)):
            return self._explorer.check_plan(answer)
        return None if answer is PreScan.SCAN else NO_EXIT


class Explorer:
    """Makes the actors of a rollout.

    Without a policy every token draws one of the candidates, or no exit, with equal probability. With one, a token does
    so with probability epsilon and follows the policy otherwise: its pre-scan, then its scan at the candidates; its
    draft stage has no place here, since every token is decided anew. Everything is drawn from streams of the prompt; a
    policy with a seed of its own gets another one for every prompt, made from its own, the rollout's and the index.

    Args:
        model: The model of the rollout.
        rules: Candidates, budget and features of the rollout.
        seed: Of the exploration.
        policy: Whom to follow; None explores uniformly.
        epsilon: Exploration at the first and at the last prompt, linear between.
        episodes: Prompts in all.

    Raises:
        ValueError: The policy can't act here: candidates that the rollout lacks, features that it doesn't read.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        rules: Rules,
        seed: int,
        policy: Policy | None = None,
        epsilon: tuple[float, float] = (0.0, 0.0),
        episodes: int = 1,
    ) -> None:
        if not all(0 <= value <= 1 for value in epsilon):
            raise ValueError(f"epsilon must be two probabilities, got {epsilon[0]}:{epsilon[1]}")
        self.rules = rules
        self.seed = seed
        self.epsilon = epsilon
        self.episodes = episodes
        self.policy_candidates: tuple[int, ...] = rules.candidates
        self._sizes = model.n_layers, model.vocab_size
        self._policy = deepcopy(policy)
        if self._policy is not None:
            self._settle(self._policy, model)

    def actor(self, prompt_index: int) -> Actor:
        """The actor of one prompt."""
        rng = numpy_stream(self.seed, Purpose.EXPLORATION, prompt_index)
        policy = None if self._policy is None else self._fresh(self._policy, prompt_index)
        return Actor(self, policy, self.epsilon_at(prompt_index), rng)

    def epsilon_at(self, prompt_index: int) -> float:
        """Probability that a token of this prompt is explored."""
        if self._policy is None:
            return 1.0
        first, last = self.epsilon
        return first + (last - first) * min(1.0, prompt_index / max(1, self.episodes - 1))

    def observe(self, row: Row, layer: int) -> npt.NDArray[np.float32]:
        """The policy's own features `(feature,)` of a row."""
        features = self._policy.features if self._policy is not None else None
        if features is None:
            return np.zeros(0, dtype=np.float32)
        values = {**row.values(), "depth": layer / self._sizes[0]}
        if features.top_k != self.rules.features.top_k:
            values["confidence"] = row.surprisal  # C_1 is -log of the top-1 probability
        return features.observe(values, *self._sizes)

    def check_plan(self, plan: ExitAt | SkipSublayers | Lookup) -> int:
        """The layer of a plan.

        Raises:
            ValueError: It is no candidate of the rollout, or the plan is no exit.
        """
        if not isinstance(plan, ExitAt):
            how = "with gaps" if isinstance(plan, SkipSublayers) else "from the text"
            raise ValueError(
                f"the policy drafts {how}, which is no exit that a rollout could record; follow a policy of exits"
            )
        if plan.exit_layer not in self.rules.candidates:
            raise ValueError(
                f"the policy drafts at layer {plan.exit_layer}, which is none of the candidates "
                f"{list(self.rules.candidates)}; add it to them"
            )
        return plan.exit_layer

    def _settle(self, policy: Policy, model: EarlyExitModel) -> None:
        """Settle the policy's candidates and check that it can act here."""
        if learns_online(policy) and not isinstance(policy, LayerSkippingPolicy):  # those are refused for their gaps
            raise ValueError(
                f"the {policy.kind} policy learns from rounds that were verified, and a rollout has none; follow a "
                "policy that does not"
            )
        from lede.checkpoint import check_fingerprint

        check_fingerprint(policy, model)
        if policy.config.candidates is None:
            policy.config = replace(policy.config, candidates=self.rules.candidates)
        policy.check_model(model)
        self.policy_candidates = policy.candidates_for(model.n_layers)
        extra = sorted(set(self.policy_candidates) - set(self.rules.candidates))
        if extra:
            raise ValueError(
                f"the policy inspects layers {extra}, which are none of the candidates {list(self.rules.candidates)}; "
                "add them"
            )
        if policy.features is not None:
            self._check_features(policy.features)
        answer = self._fresh(policy, 0).pre_scan(PreScanState(0.0, None, 0, self.rules.max_new_tokens, 1))
        if isinstance(answer, (ExitAt, SkipSublayers, Lookup)):  # better now than in the middle of a collection
            self.check_plan(answer)

    def _check_features(self, features: FeatureConfig) -> None:
        ours = self.rules.features
        features.check_token_level("a rollout")
        if "agreement" in features.names and self.policy_candidates != self.rules.candidates:
            raise ValueError(
                f"the policy's agreement is that of neighbours among its candidates {list(self.policy_candidates)}; "
                f"those of the rollout are {list(self.rules.candidates)} and must be the same"
            )
        if "confidence" in features.names and features.top_k not in (1, ours.top_k):
            raise ValueError(f"the policy's confidence has top_k {features.top_k}; a rollout reads 1 and {ours.top_k}")
        if "trace" in features.names and features.window != ours.window:
            raise ValueError(f"the policy's trace has window {features.window}; a rollout keeps {ours.window}")

    def _fresh(self, policy: Policy, prompt_index: int) -> Policy:
        """A copy of the policy for one prompt, with luck of its own."""
        policy = deepcopy(policy)
        settings = vars(policy.config)
        if "seed" in settings:
            luck = numpy_stream(self.seed, Purpose.POLICY, settings["seed"], prompt_index)
            changed: dict[str, Any] = {"seed": int(luck.integers(2**62))}
            policy.config = replace(policy.config, **changed)
        policy.reset()
        return policy


def parse_epsilon(text: str) -> tuple[float, float]:
    """Exploration at the first and at the last prompt from "START:END", or one number for both.

    Raises:
        ValueError: It is neither, or outside 0..1.
    """
    first, colon, last = text.partition(":")
    try:
        epsilon = float(first), float(last if colon else first)
    except ValueError:
        raise ValueError(f"epsilon '{text}' must look like 1.0:0.1 or be one number") from None
    if not all(0 <= value <= 1 for value in epsilon):
        raise ValueError(f"epsilon '{text}' must be within 0..1")
    return epsilon


def policy_digest(policy: Policy) -> str:
    """Short digest of a policy's settings and weights, which tells two policies of one folder apart."""
    digest = hashlib.sha256(repr(policy.config).encode())
    for name, tensor in sorted(policy.tensors().items()):
        digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()[:12]
