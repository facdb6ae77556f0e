"""`lede buffer info`: what a store holds."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

import tyro
from rich.console import Console

from lede.buffers.statistics import info


@dataclass(frozen=True)
class InfoConfig:
    """Settings of `lede buffer info`."""

    store: tyro.conf.Positional[str]
    """Folder or URL of the store."""
    json: bool = False
    """Print one JSON object."""
    verify: bool = False
    """Compare every file with its checksum first."""


def show_info(config: InfoConfig) -> None:
    """Print rows, prompts, visits by layer and action or branches by layer, and agreement by layer.

    Raises:
        ValueError: There is no store, or it is damaged; the message names the file.
    """
    found = info(config.store, verify=config.verify)
    if config.json:
        print(json_module.dumps(found.to_json()))
    else:
        Console().print(found)
