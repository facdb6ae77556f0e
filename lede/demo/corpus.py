"""Builds the training text of the demo model: permissively licensed Python source found in installed packages.

Install the sources first (``pip install --no-deps $(python -m lede.demo.corpus --list-packages)``, best into a virtual
environment of their own), then name that environment's ``site-packages`` folder. The result is a folder with
``tokenizer/``, ``train.npy``, ``validation.npy``, ``test.npy`` (uint16 ids, files separated by id 0), the raw
validation and test files as JSON lines, and ``sources.json`` with every package's version, licence and size.
"""

import collections
import email.message
import hashlib
import importlib.metadata
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BLOCK = 1024  # tokens read in one piece; every training length divides it
PACKAGES = """
accelerate aiohttp albumentations alembic allennlp altair apache-airflow-core apache-superset arviz astropy ax-platform
black bokeh botorch celery cinder cirq-core cryptography cvxpy dagster dash dask datasets deepspeed diffusers
distributed django djangorestframework docker fastapi flask flax geopandas glance gpytorch gradio gymnasium holoviews
homeassistant httpx ibis-framework ipython ironic jax jedi jinja2 keras keystone kivy kombu kornia langchain-community
langchain-core llama-index-core matplotlib mlflow mne monai mypy neutron networkx nilearn nipype nltk nova numba numpy
numpyro openai optuna pandas panel peft pennylane pip prefect prompt_toolkit pydantic pygments pymatgen pymc
pymongo pyomo pyqtgraph pyro-ppl pytest pyvista qiskit ray redis requests rich sagemaker sanic scikit-image
scikit-learn scipy scrapy setuptools sktime spacy sphinx sqlalchemy sqlfluff sqlglot stable-baselines3 starlette
statsmodels streamlit swift sympy tensor2tensor tensorflow-probability textual timm torch torch-geometric torchvision
tornado transformers trimesh trl twisted urllib3 wagtail wandb web3 werkzeug xarray zarr
""".split()
PERMISSIVE = re.compile(r"\b(MIT|Expat|BSD\w*|Apache\w*|PSF|Python Software Foundation|ISC|0BSD|HPND)\b", re.I)
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|GNU|Mozilla|EUPL|CDDL|SSPL)", re.I)
LICENCE_WORDS = re.compile(r"licen[cs]e|copyright|\(c\)|all rights reserved|SPDX", re.I)
GENERATED = re.compile(r"(auto[- ]?|automatically )generated|generated (by|from|with|file)|do not (edit|modify)", re.I)
SKIPPED_FOLDERS = {
    "_vendor",
    "vendor",
    "extern",
    "externals",
    "third_party",
    "thirdparty",
    "_vendored",
    "lib2to3",
    "locale",
}
# A word with the sign before it; a digit; signs with the line break and indentation after them; other white space.
PRE_TOKENS = r"[^\s\w]?[^\W\d]+| [^\W\d]+|\d| ?[^\s\w]+(?:\n[\n ]*)?|\n[\n ]*|\s+(?=\s)|\s"


@dataclass(frozen=True)
class CorpusConfig:
    """Settings of the corpus."""

    out: Path = Path("demo-corpus")
    """Folder to write."""
    site_packages: tuple[Path, ...] = (Path(sysconfig.get_paths()["purelib"]),)
    """Folders in which the packages are installed."""
    vocab_size: int = 8192
    """Size of the byte-level BPE vocabulary; id 0 is ``<eos>``."""
    package_bytes: int = 10_000_000
    """Most text taken from one package, so that no large one dominates."""
    seen_lines: float = 0.6
    """A file is a near duplicate if this share of its longer lines occurred in files taken before."""
    held_out: float = 0.01
    """Share of files in each of validation and test, chosen by a hash of the path."""
    tokenizer_bytes: int = 60_000_000
    """Text that the tokenizer is trained on."""
    list_packages: bool = False
    """Print the package names and stop."""


def licence_of(distribution: importlib.metadata.Distribution) -> str | None:
    """Returns the declared licence if it is permissive, otherwise None."""
    meta = cast(email.message.Message, distribution.metadata)
    stated = [
        meta.get("License-Expression") or "",
        *(c for c in meta.get_all("Classifier") or [] if c.startswith("License")),
    ]
    if not any(PERMISSIVE.search(s) for s in stated):
        stated = [(meta.get("License") or "").strip()[:300]]
    text = "; ".join(dict.fromkeys(" ".join(s.split("::")[-1].split()) for s in stated if s))
    return text[:80] if PERMISSIVE.search(text) and not COPYLEFT.search(text) else None


def strip_header(text: str) -> str:
    """Removes leading comments and a leading docstring when they speak of licence or copyright."""
    while True:
        text = text.lstrip("\n")
        head = re.match(r"(?:[ \t]*#[^\n]*\n|[ \t]*\n)+", text) or re.match(
            r"[rRuU]?(\"\"\"|''')(?:.|\n)*?\1[^\n]*\n", text
        )
        if head is None or not (LICENCE_WORDS.search(head[0]) or head[0].startswith(("#!", "# -*-", "# coding"))):
            return text
        text = text[head.end() :]


def clean(raw: bytes) -> str | None:
    """Returns the text of a source file to learn from, or None if it is too short, data, or generated."""
    if not 300 <= len(raw) <= 200_000:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = strip_header(text.replace("\r\n", "\n").replace("\t", "    ").replace("\ufeff", ""))
    text = re.sub(r"[ ]+\n", "\n", re.sub(r"\n{4,}", "\n\n\n", text)).strip("\n") + "\n"
    lines = text.split("\n")
    if len(text) < 300 or GENERATED.search(text[:1500]) or LICENCE_WORDS.search(text[:300]):
        return None
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 80 or len(text.encode()) > 1.05 * len(text):
        return None
    letters, digits = sum(map(str.isalpha, text)), sum(map(str.isdigit, text))
    return text if letters > 0.4 * len(text) and digits < 0.1 * len(text) else None


def package_files(config: CorpusConfig) -> Iterator[tuple[str, str, str, list[tuple[str, Path]]]]:
    """Yields name, version, licence and (path in the package, path on disk) of every source to read."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [(f"stdlib/{p.relative_to(stdlib)}", p) for p in stdlib.rglob("*.py") if "site-packages" not in p.parts]
    yield "python standard library", sysconfig.get_python_version(), "PSF-2.0", files
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=[str(p) for p in config.site_packages]):
        found.setdefault(re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower(), distribution)
    for name in PACKAGES:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in found:
            print(f"skipped {name}: not installed")
            continue
        distribution, licence = found[key], licence_of(found[key])
        if licence is None:
            print(f"skipped {name}: no permissive licence declared")
            continue
        listed = [(f"{name}/{f}", Path(str(f.locate()))) for f in distribution.files or [] if f.suffix == ".py"]
        yield name, distribution.version, licence, listed


def path_hash(path: str) -> int:
    """Returns a number in [0, 2**64) that depends on the path alone."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def collect(config: CorpusConfig) -> tuple[dict[str, list[tuple[str, str]]], list[dict[str, object]]]:
    """Reads, cleans, deduplicates and splits the files; returns (path, text) pairs by split, and the sources."""
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "validation": [], "test": []}
    sources: list[dict[str, object]] = []
    seen_text: set[bytes] = set()
    seen_line: set[int] = set()
    for name, version, licence, files in package_files(config):
        taken, count, dropped = 0, 0, collections.Counter[str]()
        for path, place in sorted(files, key=lambda f: path_hash(f[0])):
            if SKIPPED_FOLDERS & set(Path(path).parts) or not place.is_file():
                continue
            if taken >= config.package_bytes * (2 if licence == "PSF-2.0" else 1):
                break
            text = clean(place.read_bytes())
            if text is None:
                dropped["unsuitable"] += 1
                continue
            digest = hashlib.sha256(re.sub(r"\s+", "", text).encode()).digest()
            # Checksums of the longer lines stand for the text: cheap, and blind to reordering and reindentation.
            lines = {zlib.crc32(s.encode()) for line in text.split("\n") if len(s := line.strip()) >= 16}
            if digest in seen_text or len(lines & seen_line) >= config.seen_lines * max(len(lines), 1):
                dropped["duplicate"] += 1
                continue
            seen_text.add(digest)
            seen_line |= lines
            share = path_hash("split " + path) / 2**64
            split = "test" if share < config.held_out else "validation" if share < 2 * config.held_out else "train"
            splits[split].append((path, text))
            taken, count = taken + len(text.encode()), count + 1
        sources.append(
            {"name": name, "version": version, "licence": licence, "files": count, "bytes": taken, **dropped}
        )
        print(f"{name} {version} ({licence}): {count} files, {taken / 1e6:.1f} MB, dropped {dict(dropped)}", flush=True)
    for pairs in splits.values():
        pairs.sort(key=lambda pair: path_hash("order " + pair[0]))
    return splits, sources


def train_tokenizer(texts: list[str], config: CorpusConfig) -> Tokenizer:
    """Trains the byte-level BPE tokenizer and writes it as a transformers folder."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    sample, size = [], 0
    for text in texts:
        if size >= config.tokenizer_bytes:
            break
        sample.append(text)
        size += len(text)
    tokenizer.train_from_iterator(sample, trainer)
    folder = config.out / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "bos_token": None,
    }
    settings |= {"model_max_length": 4096, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def build_corpus(config: CorpusConfig) -> None:
    """Writes the corpus folder."""
    config.out.mkdir(parents=True, exist_ok=True)
    splits, sources = collect(config)
    (config.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    tokenizer = train_tokenizer([text for _, text in splits["train"]], config)
    for split, pairs in splits.items():
        parts: list[NDArray[np.uint16]] = []
        for start in range(0, len(pairs), 500):
            encoded = tokenizer.encode_batch_fast(
                [text for _, text in pairs[start : start + 500]], add_special_tokens=False
            )
            parts += [np.array([*e.ids, 0], np.uint16) for e in encoded]
        tokens, size = np.concatenate(parts), sum(len(text.encode()) for _, text in pairs)
        np.save(config.out / f"{split}.npy", tokens)
        print(
            f"{split}: {len(pairs)} files, {size / 1e6:.1f} MB, {len(tokens) / 1e6:.2f} M tokens, "
            f"{size / len(tokens):.2f} bytes a token",
            flush=True,
        )
        if split != "train":
            with (config.out / f"{split}.jsonl").open("w") as out:
                out.writelines(json.dumps({"path": path, "text": text}) + "\n" for path, text in pairs)


def blocks(tokens: NDArray[np.uint16], at: NDArray[np.int64], length: int) -> Tensor:
    """Reads the numbered blocks as (ids and target, sequences, length)."""
    rows = torch.from_numpy(np.stack([tokens[i * BLOCK : (i + 1) * BLOCK + 1] for i in at]).astype(np.int64))
    return torch.stack((rows[:, :-1].reshape(-1, length), rows[:, 1:].reshape(-1, length)))


if __name__ == "__main__":
    settings = tyro.cli(CorpusConfig, description=__doc__)
    print("\n".join(PACKAGES)) if settings.list_packages else build_corpus(settings)
