"""The search for sublayers to leave out: what every such search records and keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lede.policies.base import RoundReport, SkipSublayers

if TYPE_CHECKING:
    from lede.text_probe import TextProbe


@dataclass(frozen=True)
class SearchStep:
    """One iteration of a search: the set that it tried, and what came of it."""

    iteration: int
    """Counted from 1."""
    attention: tuple[int, ...]
    """Layers whose attention was left out, ascending."""
    mlp: tuple[int, ...]
    """Layers whose MLP was left out, ascending."""
    score: float | None
    """What the search measures the set by, 0 to 1; None where the set was never measured."""
    mean_accepted: float | None
    """Accepted tokens a round that drafted with the set; None where the search does not count them."""
    seconds: float
    """Wall-clock time of the iteration's probe and arithmetic, apart from decoding."""
    kept: bool
    """Whether it became the best set so far."""
    note: str
    """How the set came about, or how its trial ended."""


class SkipSearch(ABC):
    """A search that runs while texts are decoded, over as many texts as it takes.

    Attributes:
        n_layers: Layers of the model.
        plan: What drafts now; None for no draft.
        best: The best set so far; None while there is none.
        ended: Whether the search is over, for good.
        iterations: Sets tried so far.
        steps: A record of each that is done with.
    """

    def __init__(self, n_layers: int, plan: SkipSublayers | None) -> None:
        self.n_layers = n_layers
        self.plan = plan
        self.best: SkipSublayers | None = None
        self.ended = False
        self.iterations = 0
        self.steps: list[SearchStep] = []

    @abstractmethod
    def begin(self) -> None:
        """A new text begins."""

    @abstractmethod
    def verified(self, report: RoundReport) -> None:
        """A round is verified."""

    @abstractmethod
    def between_rounds(self, probe: TextProbe) -> None:
        """Go one step further, if the text allows it."""

    @property
    def kept(self) -> SkipSublayers | None:
        """What a copy that searches no more drafts with; None for no draft."""
        return self.best

    def report(self) -> list[SearchStep]:
        """A record of every iteration so far, the running one included."""
        return list(self.steps)

    def state(self) -> dict[str, Any]:
        """All of it, as plain JSON values."""
        return {
            "n_layers": self.n_layers,
            "plan": plan_to_json(self.plan),
            "best": plan_to_json(self.best),
            "ended": self.ended,
            "iterations": self.iterations,
            "steps": [asdict(step) for step in self.steps],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned.

        Raises:
            KeyError: A part is missing.
            TypeError: A part is of another type.
            ValueError: A part has no sensible value.
        """
        self.plan = plan_from_json(state["plan"], self.n_layers)
        self.best = plan_from_json(state["best"], self.n_layers)
        self.ended = bool(state["ended"])
        self.iterations = int(state["iterations"])
        self.steps = [
            SearchStep(**{**step, "attention": tuple(step["attention"]), "mlp": tuple(step["mlp"])})
            for step in state["steps"]
        ]

    def record(self, plan: SkipSublayers | None, note: str, **measured: Any) -> None:
        """Add the record of the running iteration."""
        self.steps.append(step_of(self.iterations, plan, note, **measured))


def step_of(iteration: int, plan: SkipSublayers | None, note: str, **measured: Any) -> SearchStep:
    """The record of an iteration that tried the plan."""
    attention, mlp = ((), ()) if plan is None else (tuple(sorted(plan.attention)), tuple(sorted(plan.mlp)))
    values = {"score": None, "mean_accepted": None, "kept": False, **measured}
    return SearchStep(iteration=iteration, attention=attention, mlp=mlp, note=note, **values)


def plan_of(attention: Iterable[int], mlp: Iterable[int]) -> SkipSublayers | None:
    """The plan that leaves these out; None when they are none."""
    plan = SkipSublayers(frozenset(attention), frozenset(mlp))
    return plan if plan.n_skipped else None


def plan_to_json(plan: SkipSublayers | None) -> dict[str, list[int]] | None:
    """The plan as plain JSON values."""
    return None if plan is None else {"attention": sorted(plan.attention), "mlp": sorted(plan.mlp)}


def plan_from_json(value: dict[str, list[int]] | None, n_layers: int) -> SkipSublayers | None:
    """The plan that `plan_to_json` wrote.

    Raises:
        KeyError: A part is missing.
        ValueError: It does not fit a model of `n_layers` layers.
    """
    if value is None:
        return None
    plan = SkipSublayers(frozenset(map(int, value["attention"])), frozenset(map(int, value["mlp"])))
    plan.check(n_layers)
    return plan
