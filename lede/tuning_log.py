"""tuning.json: every decode of every tuning as it comes, so that a stopped run goes on without repeating any."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lede.atomic import write_atomically
from lede.bench_runs import differences

TUNING = "tuning.json"
"""Name of the file in the folder of a benchmark."""

_FORMAT = "lede-tuning"


@dataclass(frozen=True)
class TuningDecode:
    """One decode of one setting on one validation prompt, and the plain decode that it is held against."""

    settings: str
    """The setting as a command line gives it."""
    prompt: int
    """Place of the prompt among the validation prompts, from 0."""
    repeat: int
    """Which repetition, from 0."""
    tokens: int
    """New tokens after the first."""
    seconds: float
    """Seconds after the prefill."""
    plain_tokens: int
    """The same of plain decoding, measured beside it."""
    plain_seconds: float
    """The same of plain decoding."""
    error: str | None = None
    """Why it failed; None when it did not."""
    plain_error: str | None = None
    """Why plain decoding failed on the prompt, which then tells nothing about any setting; None when it did not."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Setting, prompt and repetition."""
        return self.settings, self.prompt, self.repeat

    @property
    def tells(self) -> bool:
        """Whether there is a speed to compare: not where one of the two wrote a single token, nor after a failure."""
        counted = min(self.tokens, self.plain_tokens) > 0 and min(self.seconds, self.plain_seconds) > 0
        return counted and self.error is None and self.plain_error is None


@dataclass
class TuningRecord:
    """All that was done to tune one policy argument on one suite."""

    decodes: list[TuningDecode] = field(default_factory=list)
    """In the order in which they were made."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each setting had learned after its last decode, where it learns."""
    seconds: float = 0.0
    """Wall-clock of the tuning, plain decoding and prefills included."""
    fit: dict[str, Any] | None = None
    """What a fit came to, where one was made."""
    chosen: str | None = None
    """The setting that was chosen; None until then."""
    budget: int = 0
    """Decodes that were asked for when it was chosen."""


class TuningLog:
    """The records of one suite in tuning.json.

    Args:
        folder: Folder of the file; None keeps everything in memory.
        suite: Name of the suite.
        identity: Everything that the decodes depend on, as plain JSON values.

    Raises:
        ValueError: The file is damaged, or its decodes were made with something else.
    """

    def __init__(self, folder: Path | None, suite: str, identity: dict[str, Any]) -> None:
        self._path = None if folder is None else folder / TUNING
        self._suite, self._identity = suite, identity
        mine = self._read().get(suite, {"identity": identity, "policies": {}})
        odd = differences(identity, mine["identity"])
        if odd:
            raise ValueError(f"{self._path} holds tunings of something else: {'; '.join(odd)}; give another folder")
        self._records = {text: _record(entry) for text, entry in mine["policies"].items()}

    def record(self, as_given: str) -> TuningRecord:
        """What is known of a policy argument."""
        return self._records.setdefault(as_given, TuningRecord())

    def save(self) -> None:
        """Write the file, whole or not at all; what logs of other suites have written meanwhile stays."""
        if self._path is None:
            return
        mine = {"identity": self._identity, "policies": {text: asdict(each) for text, each in self._records.items()}}
        content = json.dumps({"format": _FORMAT, "suites": {**self._read(), self._suite: mine}}) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, content.encode())

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            content = json.loads(self._path.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']}")
            suites: dict[str, Any] = content["suites"]
            for suite in suites.values():
                for entry in suite["policies"].values():
                    _record(entry)
                dict(suite["identity"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self._path} is damaged: delete it to tune anew ({error})") from None
        return suites


def _record(entry: dict[str, Any]) -> TuningRecord:
    return TuningRecord(**{**entry, "decodes": [TuningDecode(**decode) for decode in entry["decodes"]]})
