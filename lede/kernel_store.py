"""Where kernels that were compiled ahead of time lie, and how they are found again.

A kernel is a file that torch's ahead-of-time inductor wrote, `KEY.pt2`, and a line about it, `KEY.json`, which comes
last: a kernel without it isn't there. The key is a digest of everything that its code depends on: the layer's source,
the shapes that it is given, the versions of torch, transformers and lede's own part, the processor, and the threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

FOLDER_VARIABLE = "LEDE_KERNELS"
"""Environment variable that names the folder of kernels."""
OWN_PARTS = (
    *("kernel_compiler", "kernel_inputs", "kernel_source", "compiled_layers", "fast_linear", "onednn"),
    *("packed_weights", "sublayers", "ends", "primitives"),
)
"""Modules of lede from which code is generated, or by which it is and its inputs are laid out."""


@dataclass(frozen=True)
class KernelNote:
    """What is known of a kernel beside its code."""

    about: str
    """What it runs, in words."""
    extends: bool
    """Whether it writes to the cache."""
    seconds: float
    """Seconds that compiling took."""
    digest: str
    """SHA-256 of the file of its code: torch loads a damaged one, and runs what is in it."""


def kernels_folder() -> Path:
    """The folder of kernels: what the environment variable LEDE_KERNELS says, or a folder in the user's cache.

    Raises:
        ValueError: The user has no home.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lede" / "kernels"
    except RuntimeError:
        raise ValueError(f"there is no home folder to keep kernels in; set {FOLDER_VARIABLE} to a folder") from None


def has_kernels() -> bool:
    """Whether the folder of kernels is there, and may be looked into."""
    try:
        return os.access(kernels_folder(), os.R_OK | os.X_OK) and kernels_folder().is_dir()
    except ValueError:
        return False


def make_folder() -> Path:
    """The folder of kernels, made where it isn't there.

    Raises:
        ValueError: Nothing can be written there.
    """
    folder, what_to_do = kernels_folder(), f"set {FOLDER_VARIABLE} to a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"kernels can't be kept in {folder} ({error.strerror}); {what_to_do}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"kernels can't be kept in {folder}, which can't be written; {what_to_do}")
    return folder


def kernel_key(*parts: str) -> str:
    """The name of a kernel whose code depends on these texts, on this machine and with these packages."""
    whole = "\0".join((*parts, machine_digest(), f"{torch.get_num_threads()} threads"))
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


@functools.cache
def machine_digest() -> str:
    """Of the processor and of the packages that generate code."""
    folder = Path(__file__).parent
    own = hashlib.sha256(b"".join((folder / f"{name}.py").read_bytes() for name in OWN_PARTS)).hexdigest()
    capability = torch.backends.cpu.get_cpu_capability()
    told = (torch.__version__, str(torch.version.git_version), transformers.__version__, own, capability, _processor())
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


def package_of(key: str) -> Path:
    """The file of a kernel's code, whether it is there or not."""
    return kernels_folder() / f"{key}.pt2"


def note_of(key: str) -> KernelNote | None:
    """What is known of a kernel; None where there is none, or its code is not what it was."""
    package = package_of(key)
    try:
        note = KernelNote(**json.loads(package.with_suffix(".json").read_text(encoding="utf-8")))
        return note if code_digest(package) == note.digest else None
    except (OSError, ValueError, TypeError):
        return None


def code_digest(package: Path) -> str:
    """SHA-256 of a file of code."""
    return hashlib.sha256(package.read_bytes()).hexdigest()


def note_bytes(note: KernelNote) -> bytes:
    """A note as it is written."""
    return (json.dumps(asdict(note)) + "\n").encode()


def _processor() -> str:
    """The kind of processor: code is made for what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return f"{platform.machine()} {' '.join(told)}"
