"""Settings of `lede bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lede.prompts import Chat


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a benchmark."""

    out: Path
    """Folder of everything it writes; the same command resumes a run that was stopped."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    suite: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Prompts: demo (unless given), or FORMAT:FILE with the format spec-bench, humaneval, gsm8k, cnn-dm, xsum, lm or
    jsonl; give it again for more."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A contender: a folder, NAME (tuned on validation prompts), NAME:key=value;key=value, or one of transformers' own,
    assistant-early-exit or prompt-lookup; give it again for more."""
    preset: Literal["ablation", "transfer", "window"] | None = None
    """A set of contenders: parts of a learned policy taken away, what is found on each suite frozen on all of them,
    or windows and measures of ConfLayers."""
    sweep: Annotated[tuple[Literal["static", "lookup"], ...], tyro.conf.UseAppendAction] = ()
    """Also decode with the best static settings of the validation prompts, for the best in hindsight: of `static`, or
    of `lookup`; give it again for both."""
    n_prompts: int | None = None
    """Test prompts of each suite, over all of its categories; all unless given."""
    max_new_tokens: int = 128
    """Budget of new tokens a prompt."""
    temperature: float = 0.0
    """0 decodes greedily; above 0 samples."""
    repeats: int = 1
    """Times that every prompt is decoded by everybody."""
    validation_prompts: int = 16
    """Prompts of each suite that contenders are tuned on; they are never timed."""
    max_prompt_tokens: int | None = None
    """Longer prompts are left out; those without room for the new tokens are in any case."""
    chat: Chat = "auto"
    """Whether prompts go through the chat template; `auto` is on for prompts from `turns`."""
    seed: int = 0
    """Seed of the choice of prompts, of tuning and of the tokens drawn."""
    device: str | None = None
    """Device, such as cuda; the CPU unless given."""
    dtype: str | None = None
    """Dtype of the weights, such as bfloat16; float32 on the CPU unless given."""
    compile: bool = False
    """Compile the layers, plain decoding's too; it takes seconds before the first token."""
    pack_weights: bool = False
    """Pack the weights, for plain decoding too: float32 or bfloat16 on the CPU, for as much memory again."""
    threads: int | None = None
    """Threads of torch on the CPU; as many as it takes by itself unless given."""
    profile_repeats: int = 11
    """Times that each operation is measured for the cost profile, from which the modelled speedup comes."""

    def __post_init__(self) -> None:
        for name in ("n_prompts", "max_new_tokens", "repeats", "max_prompt_tokens", "threads", "profile_repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("validation_prompts", "seed", "temperature"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.policy and self.preset is None and not self.sweep:
            raise ValueError("give at least one contender, as --policy, --sweep or --preset")

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites, each once."""
        return tuple(dict.fromkeys(self.suite)) or ("demo",)
