"""Where a model is loaded from, and what to say where nothing is found there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEMO_FOLDER = Path(__file__).parent / "demo" / "model"
"""The bundled model."""


def model_place(model: object, gguf_file: str | None, revision: str | None) -> tuple[str, dict[str, Any]]:
    """What transformers calls the place of a model, and the options that say which of its files.

    Args:
        model: "demo", a folder, a hub id, or the path of a .gguf file.
        gguf_file: Name of a GGUF file in the folder.
        revision: Hub revision.

    Raises:
        ValueError: It is none of these, or a path where nothing is.
    """
    if not isinstance(model, (str, Path)):
        raise ValueError(
            "model must be a folder, a hub id, 'demo' or a pair (hf_model, tokenizer), got "
            f"{type(model).__name__}; a model that is loaded already goes in as a pair"
        )
    source = str(DEMO_FOLDER) if str(model) == "demo" else str(model)
    if _is_path(model) and not Path(source).exists():
        raise ValueError(f"cannot load model '{model}': there is no folder or file of that name")
    if gguf_file is None and source.endswith(".gguf"):
        source, gguf_file = str(Path(source).parent), Path(source).name
    options = {"revision": revision, "gguf_file": gguf_file}
    return source, {name: value for name, value in options.items() if value}


def loading_failure(model: object, source: str, error: Exception) -> str:
    """Why a model could not be loaded, in a line."""
    text = str(error).strip()
    reason = text.splitlines()[0] if text else type(error).__name__
    # an OSError is how transformers says that it found nothing, here or at the hub
    nothing = isinstance(error, OSError) and not Path(source).exists()
    return f"cannot load model '{model}': {reason}{f' And there is no folder {source} here.' if nothing else ''}"


def _is_path(model: str | Path) -> bool:
    """Whether it can't be a hub id, which is NAME or OWNER/NAME."""
    text = str(model)
    return Path(text).is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or "\\" in text
