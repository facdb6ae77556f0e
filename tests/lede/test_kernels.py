"""Kernels that were compiled ahead of time: found again, exact, and given up where they don't fit any more."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lede import compiled_layers, compiling, models
from lede.cli import main
from lede.compiled_layers import CompiledLayers
from lede.compiling import compile_ahead
from lede.exactness import compare
from lede.features import FeatureConfig
from lede.generation import generate
from lede.head_reading import HeadReader
from lede.kernel_store import CODE, FOLDER_VARIABLE, NOTE, code_digest, kernels_folder
from lede.kernels import kernels_of
from lede.models import EarlyExitModel, load_model
from lede.policies import parse_policy
from tests.exactness import is_exact
from tests.tiny_models import plain_generate, prompt, tiny_hf_model

ROWS = (4,)
"""One row is padded to four; slow tests compile for one as well."""
POLICIES = (
    None,
    "static:exit_layer=2;draft_length=3",
    "random:seed=3;gap_probability=0",
    "lookup:draft_length=3;max_suffix=1",
)
GAPS = "random:seed=4;skip_probability=0;blind_probability=0;gap_probability=0.9"

pytestmark = pytest.mark.filterwarnings(
    # raised by torch's compiler about itself, while it compiles
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def few_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """One number of rows instead of seven, longer blocks being run eagerly; kernels of this module's own.

    Fast tests compile layers alone and read heads eagerly.
    """
    use_rows(monkeypatch, ROWS)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / ("slow" if "slow" in request.keywords else "fast")))
    if "slow" not in request.keywords:
        jobs = compiling._jobs
        monkeypatch.setattr(compiling, "_jobs", lambda *given: [job for job in jobs(*given) if job.arguments])
        monkeypatch.setattr(CompiledLayers, "read", lambda self, hidden: self._readout(hidden))
    yield
    torch._dynamo.reset()


def use_rows(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]) -> None:
    monkeypatch.setattr(compiled_layers, "ROW_BUCKETS", rows)
    for module in (compiled_layers, models):
        monkeypatch.setattr(module, "MAX_ROWS", rows[-1])


def compiled(family: str, dtype: torch.dtype = torch.float64, gaps: bool = False, packed: bool = False) -> Any:
    """A model and its kernels, which are compiled where they are not there yet."""
    model = load_model((tiny_hf_model(family, dtype), None), pack_weights=packed)
    report = compile_ahead(model, compiled_layers.ROW_BUCKETS, gaps, workers=1)
    assert not report.failed
    assert model.compile()
    assert model.compiled is not None
    return model, report


def check_exact(model: EarlyExitModel, policies: tuple[str | None, ...] = POLICIES) -> None:
    for seed, policy in enumerate(policies):
        ids = prompt(seed, 9)
        parsed = None if policy is None else parse_policy(policy)
        out = generate(model, input_ids=ids, policy=parsed, max_new_tokens=24)
        found, wanted = out.sequences[0, len(ids) :].tolist(), plain_generate(model, ids, 24)
        if model.dtype is torch.bfloat16:  # in which verification and plain decoding round differently
            apart = compare(model, ids, found, wanted)
            assert apart is None or apart.tie, apart
        else:
            is_exact(model, ids, found, wanted)


def runs_ahead(model: EarlyExitModel) -> bool:
    """Whether nothing was compiled in this process."""
    compiled = model.compiled
    return compiled is not None and not {"_layer", "_head"} & set(vars(compiled))


def test_the_text_is_the_plain_model_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = compiled("llama")
    assert report.compiled + report.found == 1, "a kind of layer"
    assert model.compiled.kernels.n_loaded == 1
    check_exact(model)
    assert generate(model, input_ids=[7], max_new_tokens=6).sequences.shape == (1, 7), "a prompt of a single token"
    assert runs_ahead(model)
    again = compile_ahead(model, ROWS)
    assert (again.compiled, again.found) == (0, 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # kernels are made for a number of threads
    other = load_model((tiny_hf_model("llama"), None))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        assert other.compile()
    assert not runs_ahead(other)
    assert "don't fit here: they were made by torch" in str(said[0].message)
    assert re.search(r"1 thread; this is .*, 77 threads;", str(said[0].message))


def test_other_weights_are_seen_and_ones_that_do_not_fit_are_not_read() -> None:
    model, _ = compiled("llama")
    hf_model, ids = model.hf_model, prompt(1, 6)

    def text() -> list[int]:
        found: list[int] = generate(model, input_ids=ids, max_new_tokens=12).sequences[0, 6:].tolist()
        assert is_exact(model, ids, found, plain_generate(model, ids, 12))
        return found

    before = text()
    mlp = hf_model.model.layers[0].mlp
    mlp.down_proj.weight = nn.Parameter(-3 * mlp.down_proj.weight.detach())
    assert text() != before, "a parameter that was replaced"
    assert runs_ahead(model)
    changed = text()
    mlp.up_proj.weight.data = mlp.up_proj.weight.data.flip(0)
    assert text() != changed, "numbers that were replaced in place"
    assert runs_ahead(model)
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().t().contiguous().t())  # no kernel for this order
    text()
    assert not runs_ahead(model)


@pytest.mark.slow
def test_other_attention_has_other_kernels() -> None:
    model, _ = compiled("llama")
    model.hf_model.set_attn_implementation("eager")
    check_exact(model, POLICIES[:2])
    assert not runs_ahead(model)


@pytest.mark.slow
def test_readings_are_those_of_eager_decoding() -> None:
    model, _ = compiled("llama")
    kernels, features = model.compiled.kernels, FeatureConfig(("surprisal", "margin", "entropy", "agreement"))
    rows = 4 * torch.randn(6, model.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[1, 3:90] = -torch.inf
    rows[2] = rows[2].round()  # ties: the lowest id
    rows[3] = 0.0
    rows[4] *= 100
    rows[5, 1:] = -torch.inf  # one token alone
    plain = HeadReader(features)
    with torch.inference_mode():
        for row in rows:
            found, wanted = HeadReader(features, kernels.reading).read(row), plain.read(row)
            assert kernels.reading(row) is not None
            assert found.token == wanted.token
            assert found[:3] == pytest.approx(wanted[:3], abs=1e-9)
        asked = HeadReader(FeatureConfig(("surprisal",)), kernels.reading).read(rows[0])
        assert asked[1:4] == (0.0, 0.0, 0.0), "what nobody asked for"
        confidence = HeadReader(FeatureConfig(("confidence", "margin")), kernels.reading).read(rows[0])
        assert confidence.confidence > 0, "no kernel reads it"


@pytest.mark.slow
def test_gradients_are_not_lost() -> None:
    model, _ = compiled("llama")
    cache = model.new_cache(12)
    with torch.no_grad():
        block = model.block(cache, 0, 4)
        model.run_layers(model.embed(torch.tensor([[1, 2, 3, 4]]), block), 0, 6, block)
    hidden = torch.randn(1, 4, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    assert model.compiled.kernels.head(hidden) is None
    with torch.no_grad():
        assert model.compiled.kernels.head(hidden) is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert model.compiled.kernels.head(hidden) is None, "torch chooses dtypes then"


@pytest.mark.slow
def test_a_kernel_that_is_damaged_or_wrong_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = compiled("llama")
    kernels = kernels_folder()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    shutil.copytree(kernels, tmp_path, dirs_exist_ok=True)
    notes = {file.parent / CODE: file.read_text(encoding="utf-8") for file in tmp_path.glob(f"*/{NOTE}")}
    heads = [file for file, note in notes.items() if "head" in note]
    layers = [file for file, note in notes.items() if "Layer" in note]
    layers[0].write_bytes(b"no package")
    other = load_model((model.hf_model, None))
    assert other.compile()
    assert not runs_ahead(other), "what can't be loaded is compiled now"
    assert load_model((model.hf_model, None)).compile(ahead=False)
    layers[0].write_bytes(heads[0].read_bytes())
    note = json.loads(notes[layers[0]])
    note["digest"] = code_digest(layers[0])
    layers[0].with_name(NOTE).write_text(json.dumps(note), encoding="utf-8")
    other = load_model((model.hf_model, None))
    with pytest.warns(UserWarning, match="compiled ahead are not used"):
        assert other.compile()
    assert other.compiled is not None
    assert other.compiled.kernels is None
    check_exact(other, POLICIES[:2])


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = compiled("llama")
    monkeypatch.setattr("lede.compiling.load_model", lambda *args, **settings: model)
    assert main(["compile", "--rows", "4"]) == 0
    assert "0 kernels compiled in 0 s, 1 were there" in capsys.readouterr().out
    monkeypatch.setattr("lede.kernel._loader", lambda: None)
    assert main(["compile"]) == 2
    assert "this torch can't load kernels" in capsys.readouterr().err


def test_layers_that_no_kernel_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[0].mlp.secret = object()
    model = load_model((hf_model, None))
    monkeypatch.setattr("lede.compiling.load_model", lambda *args, **settings: model)
    assert main(["compile"]) == 2
    error = capsys.readouterr().err
    assert "can't be compiled ahead of time: .mlp.secret is a object" in error
    assert "--compile compiles them anew" in error


@pytest.mark.slow
def test_what_fails_to_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model((tiny_hf_model("llama", torch.bfloat16), None))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    report = compile_ahead(model, ROWS, workers=1)
    assert (report.compiled, report.exit_code) == (0, 1)
    assert len(report.failed) == 3
    for said in report.failed.values():
        assert "InvalidCxxCompiler: No working C++ compiler found in" in said
        assert said.endswith("install one, such as g++, or name it by the environment variable CXX")


def test_what_is_asked_for_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*options: str) -> str:
        assert main(["compile", *options]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    for rows in ("0", "99", "3"):
        assert f"rows must be among 1, 2, 4, 6, 8, 12, 17, to which blocks are padded, got {rows}" in error(
            "--rows", rows
        )
    assert "workers must be at least 1, got 0" in error("--workers", "0")
    model = load_model((tiny_hf_model("llama"), None))
    with pytest.raises(ValueError, match="got none"):
        compile_ahead(model, ())
    monkeypatch.setattr("lede.compiling.load_model", lambda *args, **settings: model)
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(file))
    assert f"kernels can't be kept in {file} (File exists); set LEDE_KERNELS to a folder" in error()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("os.access", lambda place, how: False)
    assert "which can't be written; set LEDE_KERNELS" in error()
    assert kernels_of(model) is None, "nor looked into"
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    assert "there is no home folder to keep kernels in; set LEDE_KERNELS" in error()
    assert kernels_of(model) is None, "and --compile goes on without"


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "opt", "smollm3"])
def test_the_text_of_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rows(monkeypatch, (1, 4))
    has_parts = family != "opt"  # whose sublayers can't be left out
    model, _ = compiled(family, gaps=has_parts)
    check_exact(model, (*POLICIES, GAPS) if has_parts else POLICIES)
    assert runs_ahead(model)


@pytest.mark.slow
def test_layers_of_experts_are_compiled_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows go to which expert is data, on which shapes depend."""
    use_rows(monkeypatch, (1, 4))
    model = load_model((tiny_hf_model("mixtral"), None))
    report = compile_ahead(model, (1, 4))
    assert report.exit_code == 1
    assert all("MixtralDecoderLayer" in about and "data-dependent" in said for about, said in report.failed.items())
    assert model.compile()
    assert not runs_ahead(model)
    check_exact(model)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "packed"), [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_other_weights(dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rows(monkeypatch, (1, 4))
    model, _ = compiled("mistral", dtype, packed=packed)
    assert runs_ahead(model)
    check_exact(model)
