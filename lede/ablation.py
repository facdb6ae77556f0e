"""What each feature of the state is worth: how well acceptance can be told from them, and how fast one decodes.

Acceptance is forecast by logistic regression, fitted where random plans lead, and held against the truth where a policy
in deployment gets to, the same visits for every set. Speed is that of the reference program that sees the set and pays
for it, and of a network trained on it if that is asked for. The program always knows its layer and remembers what it
forecast and drafted in the round; a network knows what the set tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lede.acceptance import Array, Bools, area_under_curve, calibration_error, fit_logistic, inputs, logistic
from lede.cost_model import CostModel
from lede.cost_tables import CostTables
from lede.draft_rounds import DraftRounds, Stage
from lede.features import CALIBRATED, FEATURES, FeatureConfig
from lede.policies.survival import SurvivalPolicy
from lede.reference_program import ProgramConfig, ReferenceProgram
from lede.reference_thresholds import fit_forecast, lane_decisions, reference_thresholds
from lede.round_behaviour import record
from lede.seeding import Purpose, numpy_stream
from lede.simulation import play
from lede.trace_table import TraceTable
from lede.visits import Visits, Watch, join_visits, watch_plans

_FLAGS = ("in_scan", "in_draft")


def _sets() -> dict[str, FeatureConfig]:
    steps = {
        "paper": ("confidence", "entropy", "trace"),
        "+ depth": ("depth",),
        "+ surprisal": ("surprisal",),
        "+ margin": ("margin",),
        "+ agreement": ("agreement",),
        "+ history": ("acceptance", "since_draft"),
        "+ draft": ("drafted", "survival"),
        "+ certainty": ("certainty",),
        "+ calibrated": CALIBRATED,
    }
    found: dict[str, FeatureConfig] = {}
    names: tuple[str, ...] = ()
    for name, more in steps.items():
        names = (*names, *more)
        found[name] = FeatureConfig((*names, *_FLAGS))
    found["+ agreement in the draft"] = FeatureConfig((*names, *_FLAGS), draft_agreement=True)
    return found


FEATURE_SETS: Mapping[str, FeatureConfig] = MappingProxyType(_sets())
"""Sets of features, each with those before it; the stage is always seen."""

Train = Callable[[FeatureConfig], float]
"""Trains a network that sees features and gives its simulated speedup."""


@dataclass(frozen=True)
class Forecast:
    """How well acceptance is told in one stage."""

    n: int
    """Visits."""
    share: float
    """Share of them whose draft is accepted."""
    area_under_curve: float | None
    """AUC of the forecast; None if all fare alike."""
    calibration_error: float
    """Expected calibration error."""


@dataclass(frozen=True)
class FeatureValue:
    """What one set of features is worth."""

    name: str
    """The set."""
    features: tuple[str, ...]
    """What is observed."""
    scan: Forecast
    """Acceptance of an exit."""
    draft: Forecast
    """Acceptance of one more token, those before it included."""
    reference: float
    """Speedup over plain decoding of the reference program on the test prompts."""
    learned: float | None
    """The same of a network trained on the set; None where none was."""


def ablate(
    training: TraceTable,
    test: TraceTable,
    costs: CostModel,
    candidates: Sequence[int],
    sets: Mapping[str, FeatureConfig] = FEATURE_SETS,
    max_draft: int = 12,
    seed: int = 0,
    train: Train | None = None,
    program: ProgramConfig | None = None,
) -> list[FeatureValue]:
    """Values of sets of features.

    Args:
        training: Traces that everything is fitted on.
        test: Traces of other prompts.
        costs: What operations cost.
        candidates: Candidate layers.
        sets: Features by name of the set.
        max_draft: Most tokens drafted in a round.
        seed: Of what is drawn.
        train: Trains a network on a set.
        program: Of the reference program; None for its defaults.
    """
    deployed = reference_thresholds(training, costs, candidates, max_draft=max_draft, seed=seed)
    found = []
    for name, given in sets.items():
        features = _fitted(given, training, costs, candidates, max_draft, seed)
        seen = _everything(features)
        fitted, met = (
            _on_plans(_rounds(training, costs, candidates, seen, max_draft, seed), seed),
            _on_own(_rounds(test, costs, candidates, seen, max_draft, seed), deployed, seed),
        )
        chosen = [seen.names.index(each) for each in features.names]
        reference = ReferenceProgram(_rounds(training, costs, candidates, features, max_draft, seed), program, seed)
        played = play(_rounds(test, costs, candidates, features, max_draft, seed), reference.decisions(test.n_prompts))
        found.append(
            FeatureValue(
                name=name,
                features=features.names,
                scan=_forecast(fitted, met, chosen, features, Stage.SCAN),
                draft=_forecast(fitted, met, chosen, features, Stage.DRAFT),
                reference=played.speedup,
                learned=None if train is None else train(features),
            )
        )
    return found


def _everything(features: FeatureConfig) -> FeatureConfig:
    """All features there are, those of the set with its settings; what is calibrated if the set has it."""
    names = tuple(name for name in FEATURES if features.calibrated or name not in CALIBRATED)
    return replace(features, names=names)


def _fitted(
    features: FeatureConfig,
    training: TraceTable,
    costs: CostModel,
    candidates: Sequence[int],
    max_draft: int,
    seed: int,
) -> FeatureConfig:
    """The set with the forecast that it needs."""
    if not features.calibrated or features.forecast is not None:
        return features
    return replace(features, forecast=fit_forecast(training, costs, candidates, max_draft, seed))


def _rounds(
    table: TraceTable, costs: CostModel, candidates: Sequence[int], seen: FeatureConfig, max_draft: int, seed: int
) -> DraftRounds:
    return DraftRounds(table, CostTables(costs, candidates, table.max_context, max_draft), seen, seed=seed)


def _on_plans(rounds: DraftRounds, seed: int, passes: int = 3) -> Visits:
    parts = [watch_plans(rounds, numpy_stream(seed, Purpose.FORECAST, n), seed=seed)[0] for n in range(passes)]
    return join_visits(parts)


def _on_own(rounds: DraftRounds, policy: SurvivalPolicy, seed: int) -> Visits:
    """Where a policy gets to; the rounds observe more than it does."""
    assert rounds.features is not None
    places = [rounds.features.names.index(name) for name in policy.features.names]
    decide = lane_decisions(policy, rounds.table.n_prompts, places)
    watch = Watch(rounds, lambda lanes, seen, chance, survival: decide(lanes), seed=seed)
    record(rounds, np.random.default_rng(0), watch, explore=0.0)
    return watch.visits()


def _forecast(fitted: Visits, met: Visits, chosen: list[int], features: FeatureConfig, stage: Stage) -> Forecast:
    """Of one stage; with `depth`, each candidate has a regression of its own."""
    label = met.here & met.on_text
    score, rows_all = np.zeros(len(met)), met.stage == stage
    groups: list[tuple[Bools, Bools]] = [(fitted.stage == stage, rows_all)]
    if "depth" in features.names:
        each = range(fitted.match.shape[1])
        groups = [((fitted.stage == stage) & (fitted.candidate == k), rows_all & (met.candidate == k)) for k in each]
    for known, rows in groups:
        if not known.any() or not rows.any():
            continue
        weights = fit_logistic(
            _matrix(fitted, known, chosen, features), (fitted.here & fitted.on_text)[known].astype(np.float64)
        )
        score[rows] = _matrix(met, rows, chosen, features) @ weights
    score, happened = score[rows_all], label[rows_all]
    return Forecast(
        n=int(rows_all.sum()),
        share=float(happened.mean()) if happened.size else 0.0,
        area_under_curve=area_under_curve(score, happened),
        calibration_error=calibration_error(logistic(score), happened),
    )


def _matrix(visits: Visits, rows: Bools, chosen: list[int], features: FeatureConfig) -> Array:
    seen: npt.NDArray[np.float32] = visits.observations[rows][:, chosen]
    return inputs(seen, features)
