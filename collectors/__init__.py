"""Collectors: who acts and records."""

from lede.collectors.branches import BranchRules
from lede.collectors.collection import collect
from lede.collectors.config import CollectConfig
from lede.collectors.crew import WorkerError
from lede.collectors.exploration import Actor, Explorer
from lede.collectors.progress import CollectProgress
from lede.collectors.rollout import collect_rollout
from lede.collectors.teacher import collect_teacher, read_traces
from lede.collectors.texts import Text
from lede.collectors.vector_rollout import record_rollouts

__all__ = [
    "Actor",
    "BranchRules",
    "CollectConfig",
    "CollectProgress",
    "Explorer",
    "Text",
    "WorkerError",
    "collect",
    "collect_rollout",
    "collect_teacher",
    "read_traces",
    "record_rollouts",
]
