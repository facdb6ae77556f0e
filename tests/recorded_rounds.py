"""Policies and decoders that remember what was seen, in which round and behind which text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lede.cache import KVCache
from lede.decoding import Decoder
from lede.drafting import Draft, Drafter
from lede.features import FeatureConfig
from lede.lookup import LookupConfig
from lede.policies.base import ExitAt, LayerState, Lookup, Plan, Policy, PreScan, PreScanState


@dataclass
class SeenRound:
    """One round that asked the policy."""

    ids: tuple[int, ...] = ()
    """The text before it."""
    plan: Plan = PreScan.SCAN
    """What the pre-scan chose."""
    before: npt.NDArray[np.float32] | None = None
    """Observation of the pre-scan."""
    scan: list[LayerState] = field(default_factory=list)
    """States of the scan."""
    draft: list[LayerState] = field(default_factory=list)
    """States of the draft."""
    tokens: tuple[int, ...] = ()
    """Drafted tokens."""

    def everything(self) -> npt.NDArray[np.float32]:
        """All observations of the round, `(decision, feature)`."""
        assert self.before is not None
        return np.stack([self.before, *(state.observation for state in (*self.scan, *self.draft))])


class Witness(Policy):
    """Decides by its own luck and remembers every state.

    Args:
        features: What it observes.
        seed: Of its luck.
        lookups: Plans to copy from the text that it chooses from too.
        **settings: Of the policy.
    """

    kind = "witness"

    def __init__(
        self, features: FeatureConfig, seed: int = 0, lookups: tuple[Lookup, ...] = (), **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._lookups = lookups
        self._features = features
        self._luck = np.random.default_rng(seed)
        self.rounds: list[SeenRound] = []

    @property
    def features(self) -> FeatureConfig:
        return self._features

    @property
    def lookup(self) -> LookupConfig | None:
        return LookupConfig() if self._lookups else None

    def pre_scan(self, state: PreScanState) -> Plan:
        assert self.config.candidates is not None
        blind = [ExitAt(layer) for layer in self.config.candidates]
        plans: list[Plan] = [PreScan.SKIP, PreScan.SCAN, PreScan.SCAN, *blind, *self._lookups]
        plan = plans[int(self._luck.integers(len(plans)))]
        self.rounds.append(SeenRound(plan=plan, before=state.observation))
        return plan

    def scan(self, state: LayerState) -> bool:
        self.rounds[-1].scan.append(state)
        return bool(self._luck.random() < 0.5)

    def draft(self, state: LayerState) -> bool:
        self.rounds[-1].draft.append(state)
        return bool(self._luck.random() < 0.8)


class WitnessDrafter(Drafter):
    """Tells the witness what was drafted, once it is."""

    def draft(self, ids: list[int], choice: Plan, room: int, cache: KVCache) -> Draft:
        draft = super().draft(ids, choice, room, cache)
        assert isinstance(self.policy, Witness)
        seen = self.policy.rounds[-1]
        seen.ids, seen.tokens = tuple(ids), tuple(draft.tokens)
        return draft


class WitnessDecoder(Decoder):
    drafter_class = WitnessDrafter
