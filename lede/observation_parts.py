"""Which models of a policy over both sources look at which part of its observation."""

from __future__ import annotations

from dataclasses import replace

from lede.copy_forecast import copy_features
from lede.features import FEATURES, FOLLOWED, PRE_SCAN, FeatureConfig

_FLAGS = ("in_scan", "in_draft")


def before_round(features: FeatureConfig) -> FeatureConfig:
    """What the pre-scan knows.

    Raises:
        ValueError: The match with the text is not observed, and copies can't be told from nothing.
    """
    names = tuple(name for name in features.names if PRE_SCAN in FEATURES[name].stages and name not in _FLAGS)
    if "match_length" not in names:
        raise ValueError(f"copies are weighed by how long the match is: add match_length to {list(features.names)}")
    return _part(features, names)


def of_copies(features: FeatureConfig) -> FeatureConfig:
    """What the forecast of copies looks at: what the text tells before a round, whoever decides."""
    known = copy_features(memory=True)
    return _part(features, tuple(name for name in before_round(features).names if name in known))


def of_layers(features: FeatureConfig) -> FeatureConfig:
    """What forecasts of acceptance look at: what the position, the layer and the length of the draft tell.

    Raises:
        ValueError: Nothing of it is observed, or something is that neither they nor the pre-scan look at.
    """
    names = tuple(name for name in features.names if name in FOLLOWED)
    odd = [name for name in features.names if name not in (*FOLLOWED, *before_round(features).names, *_FLAGS)]
    if odd or not names:
        raise ValueError(
            f"plans are valued by what the pre-scan knows and by {', '.join(FOLLOWED)} of layers, got the features "
            f"{list(features.names)}: {'leave out ' + ', '.join(odd) if odd else 'add surprisal'}"
        )
    return _part(features, names)


def _part(features: FeatureConfig, names: tuple[str, ...]) -> FeatureConfig:
    return replace(features, names=names, draft_agreement=False, forecast=None)
