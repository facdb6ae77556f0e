"""Gymnasium environments. Importing this package registers them.

`lede/LayerExit-v0` runs a model, `lede/TraceExit-v0` plays the same process on traces, and `lede/DraftRound-v0` plays
what deployment runs; `lede/DraftRound-v1` plays it with drafts from the text as well.
"""

import gymnasium

from lede.envs.draft_round import DraftRoundEnv
from lede.envs.draft_round_vector import DraftRoundVectorEnv
from lede.envs.draft_source import DraftSourceEnv, DraftSourceVectorEnv
from lede.envs.layer_exit import LayerExitEnv
from lede.envs.layer_exit_vector import LayerExitVectorEnv
from lede.envs.rows import Decision, Row, Rules
from lede.envs.trace_exit import TraceExitEnv
from lede.envs.trace_exit_vector import TraceExitVectorEnv
from lede.envs.walk import LayerWalk

__all__ = [
    "Decision",
    "DraftRoundEnv",
    "DraftRoundVectorEnv",
    "DraftSourceEnv",
    "DraftSourceVectorEnv",
    "LayerExitEnv",
    "LayerExitVectorEnv",
    "LayerWalk",
    "Row",
    "Rules",
    "TraceExitEnv",
    "TraceExitVectorEnv",
]

gymnasium.register(
    id="lede/LayerExit-v0",
    entry_point="lede.envs.layer_exit:LayerExitEnv",
    vector_entry_point="lede.envs.layer_exit_vector:LayerExitVectorEnv",
)
gymnasium.register(
    id="lede/TraceExit-v0",
    entry_point="lede.envs.trace_exit:TraceExitEnv",
    vector_entry_point="lede.envs.trace_exit_vector:TraceExitVectorEnv",
)
gymnasium.register(
    id="lede/DraftRound-v0",
    entry_point="lede.envs.draft_round:DraftRoundEnv",
    vector_entry_point="lede.envs.draft_round_vector:DraftRoundVectorEnv",
)
gymnasium.register(
    id="lede/DraftRound-v1",
    entry_point="lede.envs.draft_source:DraftSourceEnv",
    vector_entry_point="lede.envs.draft_source:DraftSourceVectorEnv",
)
