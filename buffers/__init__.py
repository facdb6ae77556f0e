"""Stores of experience: zarr on disk, records in memory, replay buffers for d3rlpy.

Records and settings need numpy only; zarr and d3rlpy are imported when something that uses them is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lede.buffers.checking import CheckReport, Damage, check_store
    from lede.buffers.d3rlpy_view import NStepPicker
    from lede.buffers.exporting import export_store
    from lede.buffers.importing import import_store
    from lede.buffers.merging import merge_stores
    from lede.buffers.playback import play, playback_settings, replay, synthesize
    from lede.buffers.records import BRANCH_DEPTH, PromptRollout, PromptTrace, StoreError, same_record
    from lede.buffers.repairing import RepairReport, repair_store
    from lede.buffers.settings import StoreSettings, prompts_digest
    from lede.buffers.splitting import held_out_prompts, split_store
    from lede.buffers.statistics import StoreInfo, info
    from lede.buffers.store import TraceStore, TransitionStore, open_store
    from lede.buffers.writer import StoreWriter

_HOMES = {
    "CheckReport": "checking",
    "Damage": "checking",
    "check_store": "checking",
    "merge_stores": "merging",
    "RepairReport": "repairing",
    "repair_store": "repairing",
    "held_out_prompts": "splitting",
    "split_store": "splitting",
    "StoreInfo": "statistics",
    "info": "statistics",
    "NStepPicker": "d3rlpy_view",
    "export_store": "exporting",
    "import_store": "importing",
    "play": "playback",
    "playback_settings": "playback",
    "replay": "playback",
    "synthesize": "playback",
    "BRANCH_DEPTH": "records",
    "PromptRollout": "records",
    "PromptTrace": "records",
    "StoreError": "records",
    "same_record": "records",
    "StoreSettings": "settings",
    "prompts_digest": "settings",
    "TraceStore": "store",
    "TransitionStore": "store",
    "open_store": "store",
    "StoreWriter": "writer",
}

__all__ = [
    "BRANCH_DEPTH",
    "CheckReport",
    "Damage",
    "NStepPicker",
    "PromptRollout",
    "PromptTrace",
    "RepairReport",
    "StoreError",
    "StoreInfo",
    "StoreSettings",
    "StoreWriter",
    "TraceStore",
    "TransitionStore",
    "check_store",
    "export_store",
    "held_out_prompts",
    "import_store",
    "info",
    "merge_stores",
    "open_store",
    "play",
    "playback_settings",
    "prompts_digest",
    "repair_store",
    "replay",
    "same_record",
    "split_store",
    "synthesize",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
