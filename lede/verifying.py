"""`lede verify`: whether texts under a policy are the plain model's, on your model, prompts and machine.

Every prompt is decoded by transformers' own `generate`, by lede's engine without a policy, and under each policy, all
greedily, in float32 and in half precision. A text that differs is a numerical tie where the plain run's margin between
the two tokens is within the dtype's noise (`lede.exactness`), and a failure of lede beyond it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lede.prompts import Chat, check_lengths, encode_prompts, load_prompts

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.policies import Policy
    from lede.verify_results import DtypeRun, Finding, VerifyReport

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes whose noise is known (`lede.exactness.NOISE`)."""


@dataclass(frozen=True)
class VerifyConfig:
    """Settings of a verification."""

    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """A policy: a folder, NAME, or NAME:key=value;key=value; give it again for more."""
    prompts: Path
    """Prompts, .jsonl or .txt."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    max_new_tokens: int = 128
    """Budget of new tokens a prompt."""
    n_prompts: int | None = None
    """Prompts from the start of the file; all unless given."""
    dtype: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Dtype of the weights; give it again for more. Unless given float32, then bfloat16 on the CPU and float16
    elsewhere."""
    device: str | None = None
    """Device, such as cuda; the CPU unless given."""
    compile: bool = False
    """Compile the layers; transformers' text, which is compared with, comes from the model as it is."""
    pack_weights: bool = False
    """Pack the weights for lede's engine: float32 or bfloat16 on the CPU, for as much memory again."""
    chat: Chat = "auto"
    """Whether prompts go through the chat template; `auto` is on for prompts from `turns`."""
    temperature: float = 0.0
    """Must stay 0: only greedy texts can be compared."""
    out: Path | None = None
    """File for everything as JSON; replaced whole."""

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError("give at least one policy, as --policy")
        if self.temperature != 0:
            raise ValueError(
                f"verify compares greedy texts, got temperature {self.temperature}: two sampled texts differ by luck "
                "alone. The law of sampling is what tests/lede/test_sampling.py tests; leave the temperature out"
            )
        for name in ("max_new_tokens", "n_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        odd = [name for name in self.dtype if name not in DTYPES]
        if odd:
            raise ValueError(f"there is no dtype '{odd[0]}' to verify in; there are {', '.join(DTYPES)}")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes, each once."""
        on_cpu = self.device is None or self.device.partition(":")[0] == "cpu"
        return tuple(dict.fromkeys(self.dtype)) or ("float32", "bfloat16" if on_cpu else "float16")


def verify(
    config: VerifyConfig,
    model: EarlyExitModel | None = None,
    on_prompt: Callable[[str, Sequence[Finding]], None] | None = None,
) -> VerifyReport:
    """Decode the prompts and compare, without a word.

    An exception while a prompt is decoded is counted and told in the report, and the next prompt is tried; the policy
    forgets what it learned so far.

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`; it is taken as it is, in its own dtype alone.
        on_prompt: Called after each prompt with the dtype and what was found, a finding for each policy.

    Raises:
        ValueError: The prompts, the model or a policy can't be used; before anything is decoded.
    """
    from lede.checkpoint import check_fingerprint, versions
    from lede.cost_measurement import device_name
    from lede.models import load_model
    from lede.policies import parse_policy
    from lede.verify_results import VerifyReport

    policies = {text: parse_policy(text) for text in config.policy}
    texts = load_prompts(config.prompts)[: config.n_prompts]
    runs: list[DtypeRun] = []
    where: dict[str, str] = {}
    for dtype in config.dtypes if model is None else _dtypes_of(config, model):
        loaded = model
        if loaded is None:
            packs = config.pack_weights and dtype == "float32"
            loaded = load_model(config.model, config.device, dtype, compile=config.compile, pack_weights=packs)
        prompts = encode_prompts(loaded.tokenizer, texts, config.chat)
        _check_precision(loaded)
        if not runs:
            check_lengths(prompts, config.max_new_tokens, loaded.max_positions)
            for policy in policies.values():
                if policy is not None:
                    check_fingerprint(policy, loaded)
                    policy.check_model(loaded)
            where = {"model": loaded.name, "device": str(loaded.device), "device_name": device_name(loaded.device)}
            where["attention"] = loaded.attention
        runs.append(_run(config, dtype, loaded, policies, prompts, on_prompt))
        del loaded  # or the weights of the next dtype would stand beside it
        gc.collect()
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()}
    return VerifyReport(**where, versions=versions(), config=settings, runs=tuple(runs))


def run_verify(config: VerifyConfig, model: EarlyExitModel | None = None) -> VerifyReport:
    """Verify, print a line a prompt and a table, and write JSON if asked to.

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`.

    Raises:
        ValueError: The prompts, the model, a policy or the file can't be used; before anything is decoded.
    """
    from rich.console import Console

    from lede.atomic import prepare_file, write_atomically
    from lede.verify_table import prompt_lines, report

    if config.out is not None:
        prepare_file(config.out)
    console = Console()

    def tell(dtype: str, findings: Sequence[Finding]) -> None:
        for line in prompt_lines(dtype, findings):
            console.print(line, soft_wrap=True)

    found = verify(config, model, tell)
    console.print(report(found))
    if config.out is not None:
        write_atomically(config.out, (json.dumps(found.to_json(), indent=1) + "\n").encode())
        console.print(f"written to {config.out}", soft_wrap=True)
    return found


def _dtypes_of(config: VerifyConfig, model: EarlyExitModel) -> tuple[str]:
    """The dtype of a model that is given."""
    own = str(model.dtype).removeprefix("torch.")
    if own not in DTYPES:
        raise ValueError(f"the model is in {own}, whose noise is not known; there are {', '.join(DTYPES)}")
    if config.dtype not in ((), (own,)):
        raise ValueError(
            f"the given model is in {own} and taken as it is, but dtype is {', '.join(config.dtype)}; leave it out"
        )
    return (own,)


def _check_precision(model: EarlyExitModel) -> None:
    """Raise ValueError when float32 is not computed as such: the noise of TF32 is a thousand times larger."""
    import torch

    if model.device.type == "cuda" and model.dtype == torch.float32:
        matmul: Any = torch.backends.cuda.matmul
        if matmul.fp32_precision == "tf32":
            raise ValueError(
                "TF32 is on, so float32 is not computed as float32; set torch.backends.cuda.matmul.fp32_precision = "
                "'ieee'"
            )


def _run(
    config: VerifyConfig,
    dtype: str,
    model: EarlyExitModel,
    policies: dict[str, Policy | None],
    prompts: Sequence[Sequence[int]],
    on_prompt: Callable[[str, Sequence[Finding]], None] | None,
) -> DtypeRun:
    from lede.exactness import NOISE
    from lede.prompt_verification import findings_of
    from lede.verify_results import DtypeRun

    for policy in policies.values():
        if policy is not None:
            policy.reset()
    every: list[Finding] = []
    for number, ids in enumerate(prompts, start=1):
        findings = tuple(findings_of(model, policies, number, ids, config.max_new_tokens))
        every += findings
        if on_prompt is not None:
            on_prompt(dtype, findings)
    return DtypeRun(dtype, NOISE[model.dtype], tuple(every))
