"""Gymnasium environments. Importing this package registers `lede/LayerExit-v0`."""

import gymnasium

from lede.envs.layer_exit import LayerExitEnv
from lede.envs.layer_exit_vector import LayerExitVectorEnv
from lede.envs.rows import Decision, Row, Rules
from lede.envs.walk import LayerWalk

__all__ = ["Decision", "LayerExitEnv", "LayerExitVectorEnv", "LayerWalk", "Row", "Rules"]

gymnasium.register(
    id="lede/LayerExit-v0",
    entry_point="lede.envs.layer_exit:LayerExitEnv",
    vector_entry_point="lede.envs.layer_exit_vector:LayerExitVectorEnv",
)
