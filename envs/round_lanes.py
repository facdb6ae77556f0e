"""Rounds of decoding played on traces, over many lanes at once, and what they earn."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lede.cost_model import CostModel
from lede.cost_profile import CostProfile
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage, StepResult
from lede.envs.episodes import PromptOrder
from lede.envs.prompt_queue import PromptQueue
from lede.envs.trace_source import TraceSource
from lede.features import LOOKUP_FEATURES, MEMORY_FEATURES, WALL_CLOCK_FEATURES, FeatureConfig
from lede.fingerprints import compare_fingerprints
from lede.lookup import LookupConfig
from lede.lookup_table import lookups_of
from lede.policies.base import BLIND, ExitAt, Lookup
from lede.rewards import EXIT
from lede.simulation import plain_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lede.envs.trace_source import Traces
    from lede.phrases import PhraseMemory

EpisodeUnit = Literal["prompt", "round"]
"""A whole prompt, or one round of it."""

Profile = str | os.PathLike[str] | CostProfile | CostModel
"""What decoding costs: a file of `lede profile`, its content, or a cost model."""

Lanes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_ACTIONS = {
    Stage.PRE_SCAN: ("skip the draft", "scan"),
    Stage.SCAN: ("go on", "exit and draft"),
    Stage.DRAFT: ("stop", "draft on"),
}


class RoundLanes:
    """`n_lanes` lanes, each decoding one prompt; both environments are thin around it.

    Args:
        traces: Traces; see `TraceSource.load`.
        profile: Costs.
        candidates: Candidate layers; None for those of the store.
        features: Observation; None for `WALL_CLOCK_FEATURES`.
        max_draft: Most tokens drafted in a round.
        rate: Price of a second in tokens; None for the tokens a second of plain decoding.
        episode: A whole prompt or a round.
        order: Of the prompts.
        vocab_size: Entries of the vocabulary, for traces in memory.
        n_lanes: Lanes.
        lookup: How the text is searched for drafts; None where it drafts none.
        lookups: Drafts from the text to choose from.
        exits: Whether layers may draft; needs lookups if not.
        fixed_lengths: Lengths of drafts at each candidate that are made without asking.
        memory: Of other texts, behind each of the traces' own; where it holds these (`lede.phrase_folds`), reward
            flatters whoever trusts it.

    Raises:
        ValueError: A setting is out of range, or the profile is of another model than the traces.
    """

    def __init__(
        self,
        traces: Traces,
        profile: Profile,
        candidates: str | Sequence[int] | None,
        features: FeatureConfig | None,
        max_draft: int,
        rate: float | None,
        episode: EpisodeUnit,
        order: PromptOrder,
        vocab_size: int | None,
        n_lanes: int,
        lookup: LookupConfig | None = None,
        lookups: Sequence[Lookup] = (),
        exits: bool = True,
        memory: PhraseMemory | None = None,
        fixed_lengths: Sequence[int] = (),
    ) -> None:
        if episode not in get_args(EpisodeUnit):
            raise ValueError(f"episode must be one of {', '.join(get_args(EpisodeUnit))}, got '{episode}'")
        if n_lanes < 1:
            raise ValueError(f"num_envs must be at least 1, got {n_lanes}")
        if max_draft < 1:
            raise ValueError(f"max_draft must be at least 1, got {max_draft}")
        if list(fixed_lengths) != sorted(set(fixed_lengths) & set(range(1, max_draft + 1))):
            raise ValueError(
                f"fixed_lengths must be ascending within 1..max_draft = {max_draft}, got {list(fixed_lengths)}"
            )
        if fixed_lengths and not exits:
            raise ValueError(
                "fixed_lengths are of drafts by layers, which sources 'lookup' leaves out; drop one of them"
            )
        source = TraceSource.load(traces, candidates, features, vocab_size=vocab_size, use_branches=True)
        if source.table.max_new_tokens < 3:
            raise ValueError(
                f"the traces were collected with max_new_tokens {source.table.max_new_tokens}, which leaves no room "
                "for a draft; it takes at least 3"
            )
        self.table = source.table
        copying = LOOKUP_FEATURES if memory is None else MEMORY_FEATURES
        names = (*WALL_CLOCK_FEATURES, *copying) if lookups else WALL_CLOCK_FEATURES
        self.features = features or replace(source.settings.features, names=names if exits else ("trace", *copying))
        model = _cost_model(profile, source)
        layers = source.settings.candidates if exits else ()
        self.costs = CostTables(model, layers, self.table.max_context, max_draft)
        longest = max((plan.length for plan in lookups), default=1)
        self._lookup = None if lookup is None else lookups_of(self.table, lookup, longest, memory)
        self._lookups = tuple(lookups)
        self._fixed_drafts = tuple(ExitAt(layer, n) for layer in layers for n in fixed_lengths)
        self.plain_rate = float(self.table.n_decided.sum() / plain_seconds(self.table, self.costs).sum())
        self.set_rate(rate)
        self.episode = episode
        self.n_lanes = n_lanes
        self._queue = PromptQueue(self.table.n_prompts, order)
        self._begin(0)
        shape = (n_lanes,)
        self.observations = np.zeros((n_lanes, len(self.features.names)), dtype=np.float32)
        self.ended = np.ones(shape, dtype=np.bool_)  # lanes whose next call must be `move_on`
        self._unseen = np.zeros(shape, dtype=np.bool_)
        self.infos: dict[str, npt.NDArray[Any]] = {
            **{key: np.zeros(shape, dtype=np.int64) for key in ("prompt_index", "stage", "layer", "tokens")},
            "seconds": np.zeros(shape),
            **{key: np.full(shape, -1, dtype=np.int64) for key in ("n_drafted", "n_accepted")},
            "action_mask": np.zeros((n_lanes, self.n_actions), dtype=np.int8),
        }
        if lookups:
            self.infos["source"] = np.full(shape, -1, dtype=np.int64)

    @property
    def n_actions(self) -> int:
        """Actions of the pre-scan, the stage that has most."""
        return self.rounds.n_actions

    @property
    def bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Lowest and highest observation, `(feature,)` each."""
        return self.features.bounds(self.table.n_layers, self.table.vocab_size)

    def set_rate(self, rate: float | None) -> None:
        """Set the price of a second in tokens; None for the rate of plain decoding.

        Raises:
            ValueError: It is no positive number.
        """
        if rate is not None and not 0 < rate < np.inf:
            raise ValueError(f"rate must be a positive number of tokens a second, got {rate}")
        self.rate = self.plain_rate if rate is None else float(rate)

    def start_over(self, rng: np.random.Generator, seed: int | None) -> None:
        """Forget everything and put every lane at the start of a prompt.

        Args:
            rng: Orders the prompts.
            seed: Of the acceptance of sampled drafts; None draws one from `rng`.
        """
        self._begin(int(rng.integers(2**31)) if seed is None else seed)
        self._queue.start_over()
        self._next_prompts(np.arange(self.n_lanes), rng)

    def move_on(self, lanes: Lanes, rng: np.random.Generator) -> None:
        """Start the next episode of lanes: the next round if the text goes on and episodes are rounds, else a prompt.

        A round that is left undecided goes to its end by the first legal actions: it drafts no more.
        """
        stays = np.zeros(lanes.shape, dtype=np.bool_)
        if self.episode == "round":
            undecided = lanes[~self.ended[lanes]]
            while undecided.size:
                result = self._step(undecided, self.rounds.legal().argmax(axis=1))
                undecided = undecided[~result.round_end[undecided]]
            stays = self.rounds.stage[lanes] != Stage.DONE
            self._show(lanes[stays])
        self._next_prompts(lanes[~stays], rng)

    def step(self, lanes: Lanes, actions: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.float64], Flags]:
        """Act on lanes whose episode goes on.

        Args:
            lanes: Lanes.
            actions: Legal ones, one for each of `lanes`.

        Returns:
            Rewards, and whether the episodes terminated, one for each of `lanes`.
        """
        everywhere = np.zeros(self.n_lanes, dtype=np.int64)
        everywhere[lanes] = actions
        n_drafted, n_accepted = self._draft_after(everywhere)
        result = self._step(lanes, everywhere)
        first_plan = BLIND + self.rounds.candidates.size
        planned = everywhere >= first_plan  # a whole round at once
        copies = planned & (everywhere < first_plan + len(self._lookups))
        n_drafted = np.where(planned, result.drafted, n_drafted)
        n_accepted = np.where(planned, result.accepted, n_accepted)
        terminated = (result.done if self.episode == "prompt" else result.round_end)[lanes]
        self.ended[lanes] = terminated
        self._show(lanes[~terminated])  # a terminated episode has no next state: its last one stays in view
        round_end = result.round_end[lanes]
        self.infos["tokens"][lanes] = result.tokens[lanes]
        self.infos["seconds"][lanes] = result.seconds[lanes]
        self.infos["n_drafted"][lanes] = np.where(round_end, n_drafted[lanes], -1)
        self.infos["n_accepted"][lanes] = np.where(round_end, n_accepted[lanes], -1)
        if self._lookups:
            which = np.where(n_drafted == 0, 0, np.where(copies, 2, 1))
            self.infos["source"][lanes] = np.where(round_end, which[lanes], -1)
        return result.tokens[lanes] - self.rate * result.seconds[lanes], terminated

    def look(self) -> None:
        """Bring observations and infos up to where the lanes stand; once after all calls of a step."""
        lanes = np.flatnonzero(self._unseen)
        if lanes.size:
            rounds = self.rounds
            self.observations[lanes] = rounds.observe()[lanes]
            self.infos["action_mask"][lanes] = rounds.legal()[lanes]
            self.infos["prompt_index"][lanes] = self.table.prompt_index[rounds.prompt[lanes]]
            self.infos["stage"][lanes] = rounds.stage[lanes]
            self.infos["layer"][lanes] = rounds.layer[lanes]
            self._unseen[lanes] = False

    def legal_actions(self, lane: int) -> str:
        """The stage of a lane and what is legal there, in words."""
        stage = Stage(int(self.infos["stage"][lane]))
        blind = (f"draft blind at layer {layer}" for layer in self.costs.candidates)
        fixed = (f"draft {plan.length} tokens at layer {plan.exit_layer} unasked" for plan in self._fixed_drafts)
        words = (*_ACTIONS[stage], *blind, *map(_copying, self._lookups), *fixed)
        legal = ", ".join(f"{a} ({words[a]})" for a in np.flatnonzero(self.infos["action_mask"][lane]))
        return f"in the {stage.name.lower().replace('_', '-')} they are {legal}"

    def _begin(self, seed: int) -> None:
        # as in decoding: a policy that can't tell the stages apart isn't asked before the scan
        decides = "in_scan" in self.features.names or not self.costs.candidates
        self.rounds = DraftRounds(
            self.table,
            self.costs,
            self.features,
            decides,
            seed,
            lookup=self._lookup,
            plans=(*self._lookups, *self._fixed_drafts),
        )
        self.rounds.start(np.zeros(self.n_lanes, dtype=np.int64))
        self._matches = self.table.matches(self.rounds.candidates - 1, seed)

    def _step(self, lanes: Lanes, actions: Lanes) -> StepResult:
        """Step some lanes by actions `(lane,)`; the others stay where they are."""
        waits = np.ones(self.n_lanes, dtype=np.bool_)
        waits[lanes] = False
        stages = self.rounds.stage[waits]
        self.rounds.stage[waits] = Stage.DONE  # lanes that are done ignore their actions
        result = self.rounds.step(actions)
        self.rounds.stage[waits] = stages
        return result

    def _draft_after(self, actions: Lanes) -> tuple[Lanes, Lanes]:
        """Tokens drafted in each lane's round, and accepted if it ends, once `actions` are taken, `(lane,)` each."""
        rounds = self.rounds
        if not rounds.candidates.size:
            return rounds.n_drafted, rounds.n_accepted
        blind = (actions >= BLIND) & (actions < BLIND + rounds.candidates.size)
        drafts = blind | ((actions == EXIT) & (rounds.stage != Stage.PRE_SCAN))
        candidate = np.where(blind, actions - BLIND, rounds.candidate)
        right = drafts & (rounds.n_accepted == rounds.n_drafted) & self._matches[rounds.row, candidate]
        return rounds.n_drafted + drafts, rounds.n_accepted + right

    def _next_prompts(self, lanes: Lanes, rng: np.random.Generator) -> None:
        """Put lanes at the start of the next prompts; a prompt without a decision is passed over."""
        waiting = lanes
        while waiting.size:
            self.rounds.restart(waiting, self._queue.take(waiting.size, rng) % self.table.n_prompts)
            waiting = waiting[self.rounds.stage[waiting] == Stage.DONE]
        self._show(lanes)

    def _show(self, lanes: Lanes) -> None:
        """Mark lanes whose state comes into view, before anything was done there."""
        self._unseen[lanes] = True
        self.ended[lanes] = False
        self.infos["tokens"][lanes] = 0
        self.infos["seconds"][lanes] = 0
        self.infos["n_drafted"][lanes] = -1
        self.infos["n_accepted"][lanes] = -1
        if self._lookups:
            self.infos["source"][lanes] = -1


def _copying(plan: Lookup) -> str:
    pruned = "" if plan.prune_at is None else f", pruned at layer {plan.prune_at}"
    return f"copy up to {plan.length} tokens{pruned}"


def _cost_model(profile: Profile, source: TraceSource) -> CostModel:
    found = CostProfile.load(Path(profile)) if isinstance(profile, str | os.PathLike) else profile
    settings = source.settings
    if isinstance(found, CostProfile):
        if found.fingerprint and settings.fingerprint:
            differences = compare_fingerprints(settings.fingerprint, found.fingerprint)
            if differences:
                raise ValueError(
                    f"the profile was measured on another model than the traces (traces / profile): "
                    f"{'; '.join(differences)}; make it with `lede profile` on the model of the traces"
                )
        found = found.costs
    if found.n_layers != source.table.n_layers:
        raise ValueError(
            f"the profile is of a model with {found.n_layers} layers, the traces of one with {source.table.n_layers}"
        )
    return found
