"""Collectors: who acts and records."""

from lede.collectors.branches import BranchRules
from lede.collectors.collection import CollectConfig, collect
from lede.collectors.exploration import Actor, Explorer
from lede.collectors.progress import CollectProgress
from lede.collectors.rollout import collect_rollout
from lede.collectors.teacher import collect_teacher, read_traces

__all__ = [
    "Actor",
    "BranchRules",
    "CollectConfig",
    "CollectProgress",
    "Explorer",
    "collect",
    "collect_rollout",
    "collect_teacher",
    "read_traces",
]
