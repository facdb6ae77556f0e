"""Policies that draft with a subset of the sublayers, and search for it while they decode."""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lede.features import FeatureConfig
from lede.policies.base import (
    ExitAt,
    LayerState,
    Policy,
    PolicyConfig,
    PreScan,
    PreScanState,
    RoundReport,
    SkipSublayers,
)
from lede.policies.skip_search import SearchStep, SkipSearch, plan_of

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.text_probe import TextProbe

_SETS = ("attention", "mlp")
_FEATURES = FeatureConfig(names=("surprisal",))  # a limit on the probability is one on its negative logarithm


@dataclass(frozen=True)
class LayerSkippingConfig(PolicyConfig):
    """Settings that every policy of this kind has."""

    max_draft: int = 25
    """Most tokens drafted in a round."""
    stop_threshold: float = 0.8
    """A draft ends with the first position whose likeliest token is less probable; that position is still drafted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stop_threshold <= 1:
            raise ValueError(f"stop_threshold must be within 0..1, got {self.stop_threshold}")


class LayerSkippingPolicy(Policy):
    """Drafts with some sublayers left out, and looks for the sublayers while it decodes.

    The search belongs to the policy object: it goes on over texts, until it ends by its own rules or `reset()` makes
    it start over. A policy that was saved with a set, or made by `frozen` or `from_sets`, drafts with that set and
    never searches.

    Its drafts are chains. A policy has one search, so it decodes one text at a time.

    Departs from the papers: where drafts are sampled, the probability of the likeliest token ends a draft, not that of
    the token that was drawn.
    """

    config_class: ClassVar[type[PolicyConfig]] = LayerSkippingConfig
    config: LayerSkippingConfig

    _search: SkipSearch | None = None
    _settled: tuple[SkipSublayers | None] | None = None  # the set that is used without a search, None in it is empty

    @abstractmethod
    def _new_search(self, n_layers: int) -> SkipSearch:
        """A search on a model of that many layers, not begun.

        Raises:
            ValueError: The settings leave nothing to search there.
        """

    @classmethod
    def from_sets(
        cls,
        attention: frozenset[int],
        mlp: frozenset[int],
        config: LayerSkippingConfig | None = None,
        **settings: Any,
    ) -> Self:
        """A policy that drafts with these sublayers left out and never searches.

        Args:
            attention: Layers of 2..L-1 whose attention is left out.
            mlp: Layers whose MLP is left out; when both are empty it never drafts.
            config: Settings; `settings` are laid over them.
            **settings: Fields of the config.
        """
        policy = cls(config, **settings)
        policy._settled = (plan_of(attention, mlp),)
        return policy

    def frozen(self) -> Self:
        """A copy that drafts with what the search would keep now and never searches; with nothing, it never drafts."""
        other = deepcopy(self)
        if other._settled is None:
            other._settled = (None if other._search is None else other._search.kept,)
        other._search = None
        return other

    @property
    def features(self) -> FeatureConfig:
        """-log probability of the likeliest token, which ends a draft."""
        return _FEATURES

    @property
    def best(self) -> SkipSublayers | None:
        """The set that is used without a search, or the best one found so far; None when there is none."""
        if self._settled is not None:
            return self._settled[0]
        return None if self._search is None else self._search.best

    @property
    def searches(self) -> bool:
        """Whether the search goes on."""
        return self._settled is None and self._search is not None and not self._search.ended

    def search_report(self) -> list[SearchStep]:
        """A record of every iteration of this object's search, the running one included; empty without a search."""
        return [] if self._search is None else self._search.report()

    def check_model(self, model: EarlyExitModel) -> None:
        """Make the policy ready for this model.

        Raises:
            ValueError: The model's layers do not fit the set or the settings or can't be run in part, or the search
                began on a model with another number of layers.
        """
        super().check_model(model)
        n_layers = model.n_layers
        if self._settled is not None and self._settled[0] is None:
            return
        model.check_sublayers()
        if self._settled is not None and self._settled[0] is not None:
            self._settled[0].check(n_layers)
            return
        if n_layers < 3:
            raise ValueError(f"the first and the last layer can't be left out, and the model has only {n_layers}")
        if self._search is None or (self._search.n_layers != n_layers and not self._search.iterations):
            self._search = self._new_search(n_layers)
        if self._search.n_layers != n_layers:
            raise ValueError(
                f"this {self.kind} policy searches on a model of {self._search.n_layers} layers, and this one has "
                f"{n_layers}; use a policy of its own for it, or reset() this one"
            )

    def reset(self) -> None:
        """Forget the search; a set that the policy was made or loaded with stays."""
        if self._search is not None:
            self._search = self._new_search(self._search.n_layers)

    def begin(self, n_prompt_tokens: int) -> None:
        """A new text begins."""
        if self.searches:
            self._running().begin()

    def verified(self, report: RoundReport) -> None:
        """A round is verified."""
        if self.searches:
            self._running().verified(report)

    def between_rounds(self, probe: TextProbe) -> None:
        """Search on."""
        if self.searches:
            self._running().between_rounds(probe)

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt | SkipSublayers:
        """Draft with the current set; skip when it is empty."""
        plan = self._settled[0] if self._settled is not None else self._running().plan
        return PreScan.SKIP if plan is None else plan

    def scan(self, state: LayerState) -> bool:
        """No exit; asked only where a caller scans in spite of `pre_scan`."""
        return False

    def draft(self, state: LayerState) -> bool:
        """Draft on unless the last drafted position was not sure enough."""
        least = self.config.stop_threshold
        return least == 0 or float(state.observation[0]) <= -math.log(least)

    def state(self) -> dict[str, Any]:
        """The search with all that it found, as plain JSON values; empty without one."""
        if self._search is None:
            return {}
        return {"kind": self.kind, "config": _json_of(self.config), "search": self._search.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with a search from what `state` returned; an empty one resets.

        Raises:
            ValueError: It belongs to another kind of policy or other settings, is damaged, the search needs a package
                that is not installed, or this policy has a set and does not search.
        """
        if not state:
            self.reset()
            return
        if self._settled is not None:
            raise ValueError(f"this {self.kind} policy has a set of its own and does not search; it takes no state")
        if state.get("kind") != self.kind:
            raise ValueError(f"the state is of a '{state.get('kind')}' policy, not of a '{self.kind}' one")
        given, own = state.get("config"), _json_of(self.config)
        if given != own:
            names = [key for key in own if not isinstance(given, dict) or given.get(key) != own[key]]
            raise ValueError(f"the state is of a {self.kind} search with other settings: {', '.join(names)}")
        search = self._new_search(self._n_layers_of(state))  # says itself what it lacks
        try:
            search.restore(state["search"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(error) from None
        self._search = search

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """`attention` and `mlp`, the layers left out, once there is a best set or the search has ended."""
        if self._settled is None and self.best is None and not (self._search is not None and self._search.ended):
            return {}
        kept = self._settled[0] if self._settled is not None else self._running().kept
        sets = ((), ()) if kept is None else (sorted(kept.attention), sorted(kept.mlp))
        return {name: np.asarray(layers, dtype=np.int64) for name, layers in zip(_SETS, sets, strict=True)}

    def load_tensors(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Use a saved set, without a search; none given, it searches.

        Raises:
            ValueError: The tensors are no two sets of layers.
        """
        if not tensors:
            return
        if sorted(tensors) != list(_SETS) or any(t.ndim != 1 or t.dtype.kind != "i" for t in tensors.values()):
            found = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in sorted(tensors.items()))
            raise ValueError(f"the tensors of a {self.kind} policy are lists of layers, attention and mlp; got {found}")
        self._settled = (plan_of(tensors["attention"].tolist(), tensors["mlp"].tolist()),)

    def _n_layers_of(self, state: dict[str, Any]) -> int:
        """Layers of the model that a state's search is on."""
        try:
            n_layers = int(state["search"]["n_layers"])
            if n_layers < 3:
                raise ValueError(f"a search on {n_layers} layers")
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from None
        return n_layers

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(f"the state of the {self.kind} search is damaged: {error!r}")

    def _running(self) -> SkipSearch:
        if self._search is None:
            raise ValueError(f"this {self.kind} policy takes its layers from the model; call check_model(model) first")
        return self._search


def _json_of(config: PolicyConfig) -> dict[str, Any]:
    """The settings as JSON would give them back, but for those that a binding makes explicit."""
    return {key: value for key, value in asdict(config).items() if key not in ("candidates", "trained_temperature")}
