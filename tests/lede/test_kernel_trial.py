"""Kernels that are loaded when decoding has begun are held against eager layers at their first call.

Programs stand for kernels here, as torch's compiler is given them; what it makes of them is the matter of test_kernels.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lede import compiling, kernels
from lede.closeness import distance, reading_distance
from lede.compiled_layers import ROW_BUCKETS, CompiledLayers
from lede.generation import generate
from lede.kernel import Kernel
from lede.kernel_compiler import KernelJob, _HeadProgram, _LayerProgram
from lede.kernel_inputs import tensors_in
from lede.kernel_source import KernelSource, UnknownPartError
from lede.kernel_store import KernelNote
from lede.kernels import Kernels
from lede.models import EarlyExitModel, load_model
from lede.open_slots import run_open
from lede.policies import parse_policy
from tests.exactness import is_exact
from tests.tiny_models import plain_generate, prompt, tiny_hf_model

GAPS = "random:seed=4;skip_probability=0;blind_probability=0;gap_probability=0.9"


class Program:
    """What runs a kernel's job as it is."""

    def __init__(self, job: KernelJob) -> None:
        self.job = job
        self.n_calls = 0
        self.fault = 0.0
        self.error = ""

    def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.n_calls += 1
        if self.error:
            raise RuntimeError(self.error)
        if self.job.arguments is None:
            return [_HeadProgram(self.job)(inputs[0], inputs[1:]) + self.fault]
        n_tables = len(tensors_in(self.job.arguments))
        tables, weights = inputs[5 : 5 + n_tables], inputs[5 + n_tables :]
        return [_LayerProgram(self.job)(*inputs[:5], tables, weights) + self.fault]


def with_programs(
    monkeypatch: pytest.MonkeyPatch, family: str, gaps: bool, are_tried: bool = True
) -> tuple[EarlyExitModel, dict[str, Program]]:
    """A model that runs by programs alone: asking for another kernel is an error."""
    model = load_model((tiny_hf_model(family), None))
    programs = {job.key: Program(job) for job in compiling._jobs(model, ROW_BUCKETS, gaps)}

    def load(key: str, is_tried: bool) -> Kernel:
        note = KernelNote(programs[key].job.about, programs[key].job.extends, 0.0, "", "", "")
        return Kernel(key, note, programs[key], is_tried)

    monkeypatch.setattr(kernels, "load_kernel", load)
    mine = Kernels(model)
    mine.are_tried = are_tried
    model.compiled = CompiledLayers(model.tables, model.cache_argument, model.readout, False, mine)
    return model, programs


def texts(model: EarlyExitModel, policy: str) -> None:
    for seed in range(2):
        ids = prompt(seed, 9)
        out = generate(model, input_ids=ids, policy=parse_policy(policy), max_new_tokens=24)
        is_exact(model, ids, out.sequences[0, len(ids) :].tolist(), plain_generate(model, ids, 24))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_each_is_tried_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps too, of which the trial of all layers knows nothing; what decoding asks for is what there is."""
    model, programs = with_programs(monkeypatch, family, gaps=True)
    tried: list[str] = []
    monkeypatch.setattr(Kernel, "try_out", noted(tried))
    texts(model, GAPS)
    called = [program for program in programs.values() if program.n_calls]
    for gap in ("without attention", "without MLP"):
        assert any(gap in program.job.about for program in called)
    assert sorted(tried) == sorted(program.job.key for program in called), "each at its first call, and no more"
    assert max(program.n_calls for program in called) > 2
    assert "_layer" not in vars(model.compiled)


@pytest.mark.parametrize("error", ["", "expected 2 inputs\nmore"])
def test_a_wrong_one_is_not_used(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, programs = with_programs(monkeypatch, "llama", gaps=True)
    wrong = [program for program in programs.values() if "without" in program.job.about]
    for program in wrong:
        program.fault, program.error = 1e-3, error
    # what has no kernel is compiled when it is met, and here run as it is
    monkeypatch.setattr(CompiledLayers, "_layer", dict.fromkeys(ROW_BUCKETS, run_open))
    with pytest.warns(UserWarning, match="compiled ahead is not used") as warned:
        texts(model, GAPS)
    used = [program for program in wrong if program.n_calls]
    assert used
    assert all(program.n_calls == 1 for program in used)
    said = [str(each.message) for each in warned]
    assert len(said) == len(used)
    wanted = "expected 2 inputs; delete" if error else "of the largest; delete"
    assert all("without" in each and wanted in each for each in said)


def test_those_of_a_trial_of_all_layers_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, programs = with_programs(monkeypatch, "llama", gaps=False, are_tried=False)
    monkeypatch.setattr(Kernel, "try_out", lambda *given: pytest.fail("tried"))
    texts(model, "static:exit_layer=2;draft_length=3")
    assert sum(program.n_calls for program in programs.values()) > 40


def test_heads_and_readings_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, programs = with_programs(monkeypatch, "llama", gaps=False)
    assert model.compiled is not None
    mine = model.compiled.kernels
    assert mine is not None
    for program in programs.values():
        program.fault = 1.0 if program.job.about == "reading of logits" else 1e-2
    with torch.inference_mode():
        hidden = torch.randn(1, 4, model.config.hidden_size, dtype=torch.float64)
        with pytest.warns(UserWarning, match=r"\(head, 4 rows\): what it says differs by"):
            logits = mine.head(hidden)
        assert logits is not None
        assert torch.equal(logits, model.readout(hidden))
        assert mine.head(hidden) is None
        with pytest.warns(UserWarning, match=r"\(reading of logits\)"):
            numbers = mine.reading(logits[0, 0])
        assert numbers is not None
        assert numbers[3] == int(logits[0, 0].argmax())
        assert mine.reading(logits[0, 0]) is None


def test_numbers_that_are_none_try_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, programs = with_programs(monkeypatch, "llama", gaps=False)
    assert model.compiled is not None
    mine = model.compiled.kernels
    assert mine is not None
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mine.head(torch.full((1, 4, model.config.hidden_size), torch.nan, dtype=torch.float64))
        assert found is not None
        assert not any(program.n_calls for program in programs.values())
        assert mine.head(torch.ones(1, 4, model.config.hidden_size, dtype=torch.float64)) is not None
    assert sum(program.n_calls for program in programs.values()) == 1


def test_slots_of_another_dtype_have_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt under autocast may leave values, but not keys, in half precision: code would read past their end."""
    model, _ = with_programs(monkeypatch, "llama", gaps=False)
    hidden, layer = torch.zeros(1, 1, model.config.hidden_size, dtype=torch.float64), model.steps[0][1]
    block = model.block(model.new_cache(9), 5, 1)
    arguments, source = model.tables.arguments(block, 0, hidden), KernelSource(layer)
    keys, values = torch.zeros(2, 1, 2, 9, 8, dtype=torch.float64)
    names = {
        kernels.kernel_name(source, hidden, arguments, (keys, each))
        for each in (values, values.bfloat16(), values[..., :4])
    }
    assert len(names) == 3


def test_a_function_that_is_put_in_place_of_a_class_s_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model((tiny_hf_model("llama"), None))
    layer: Any = copy.deepcopy(model.steps[0][1])
    source = KernelSource(layer)
    assert source.holds()
    with monkeypatch.context() as patch:
        patch.setattr(type(layer.mlp), "forward", twice)
        assert not source.holds()
        assert KernelSource(layer).text != source.text
        patch.setattr(type(layer.mlp), "forward", lambda self, x: x)
        with pytest.raises(UnknownPartError, match=r"\.mlp\.forward is a function"):
            KernelSource(layer)
    assert source.holds()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", twice)
    assert not source.holds()
    assert KernelSource(layer).text != source.text


def twice(self: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
    return 2 * x


def test_a_layer_that_was_changed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may still have the name that fits, as when a function was wrapped."""
    model, _ = with_programs(monkeypatch, "llama", gaps=False, are_tried=False)
    texts(model, "static:exit_layer=2;draft_length=3")
    tried: list[str] = []
    monkeypatch.setattr(Kernel, "try_out", noted(tried))
    with monkeypatch.context() as patch:
        patch.setattr(KernelSource, "holds", lambda *given: False)
        assert model.compiled is not None
        model.compiled.renew()
    texts(model, "static:exit_layer=2;draft_length=3")
    assert tried
    assert len(tried) == len(set(tried))


def noted(tried: list[str]) -> Any:
    """`Kernel.try_out`, noting which."""
    try_out = Kernel.try_out

    def noting(self: Kernel, *given: Any) -> None:
        tried.append(self.key)
        try_out(self, *given)

    return noting


def test_how_far_numbers_lie_apart() -> None:
    one = torch.tensor([0.0, -torch.inf, 4.0])
    assert distance(one, one) == 0.0
    assert distance(torch.zeros(3), torch.zeros(3)) == 0.0
    assert distance(torch.tensor([1.0, -torch.inf, 4.0]), one) == 0.25
    assert distance(torch.tensor([0.0, 1.0, 4.0]), one) == torch.inf
    assert distance(torch.tensor([0.0, torch.nan, 4.0]), one) == torch.inf
    assert distance(torch.ones(3), torch.zeros(3)) == torch.inf
    told = torch.tensor([1.0, 2.0, 3.0, 7.0])
    assert reading_distance(told, told) == 0.0
    assert reading_distance(told, torch.tensor([1.0, 2.0, 3.0, 6.0])) == torch.inf
    assert reading_distance(torch.full((4,), torch.nan), told) == torch.inf
