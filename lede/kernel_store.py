"""Where kernels that were compiled ahead of time lie, and how they are found again.

A kernel is a folder `KEY` of a file that torch's ahead-of-time inductor wrote and a note about it. It gets its name
when both are in it, so that they always belong together, whoever else compiles the same. The key is a digest of
everything that its code depends on: the layer's source, the shapes that it is given, the versions of torch,
transformers and lede's own part, the processor, and the threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import torch
import transformers

FOLDER_VARIABLE = "LEDE_KERNELS"
"""Environment variable that names the folder of kernels."""
OWN_PARTS = (
    *("kernel_compiler", "kernel_inputs", "kernel_source", "open_slots", "compiled_layers", "fast_linear", "onednn"),
    *("packed_weights", "sublayers", "ends", "primitives", "skeletons"),
)
"""Modules of lede from which code is generated, or by which it is and its inputs are laid out."""
CODE, NOTE, PARTIAL = "kernel.pt2", "note.json", ".partial"
"""Files of a kernel, and how the name of a folder ends that is not a kernel yet, or not any more."""
RUBBISH_AGE = 24 * 3600.0
"""Seconds after which nobody writes to such a folder any more: its compiler was killed."""
TRIES = 10
"""How often a kernel is put in place while others do the same."""


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
    source: str
    """What the code is of, as `source_digest` tells it."""
    made_by: str
    """What made it, in words, as `maker` tells it."""


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
    """The folder of kernels, made where it isn't there, without what killed compilers left.

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
    for left in folder.glob(f".*{PARTIAL}"):
        try:
            if time.time() - left.stat().st_mtime > RUBBISH_AGE:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:  # somebody else was faster
            continue
    return folder


def source_digest(*parts: str) -> str:
    """Of the texts that code depends on, whatever makes it."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def kernel_key(*parts: str) -> str:
    """The name of a kernel whose code depends on these texts, on this machine and with these packages."""
    return source_digest(*parts, machine_digest(), f"{torch.get_num_threads()} threads")


def maker() -> str:
    """What makes kernels here, in words; the parts of the key that people can change."""
    n_threads = torch.get_num_threads()
    threads = "1 thread" if n_threads == 1 else f"{n_threads} threads"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {threads}"


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
    return kernels_folder() / key / CODE


def note_of(key: str) -> KernelNote | None:
    """What is known of a kernel; None where there is none, or its code is not what it was."""
    package = package_of(key)
    try:
        note = _read_note(package.parent)
        return note if code_digest(package) == note.digest else None
    except (OSError, ValueError, TypeError):
        return None


def makers_of(sources: Collection[str]) -> list[str]:
    """What made the kernels of such sources that lie here, in words; their code is not looked at."""
    found = set()
    for folder in kernels_folder().glob("[!.]*"):
        try:
            note = _read_note(folder)
        except (OSError, ValueError, TypeError):
            continue
        if note.source in sources:
            found.add(note.made_by)
    return sorted(found)


@contextmanager
def new_kernel(key: str) -> Iterator[Path]:
    """A folder to put code and note of a kernel into, which is gone afterwards, renamed by `put_in_place` or not."""
    partial = kernels_folder() / f".{key}.{uuid4().hex}{PARTIAL}"
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, key: str, note: KernelNote) -> None:
    """Give a kernel its name; where others have made the same one, theirs stays, unless it is damaged.

    Raises:
        OSError: It can't be written, or others change the folder all the time.
    """
    # nothing is forced to the disk: a kernel that a crash cuts short is not what its note says
    (partial / NOTE).write_text(json.dumps(asdict(note)) + "\n", encoding="utf-8")
    place = partial.with_name(key)
    for attempt in range(TRIES):
        try:
            partial.rename(place)
            return
        except OSError:  # a folder that holds something is not replaced
            if note_of(key) is not None:
                return
            if attempt == TRIES - 1:
                raise
            aside = partial.with_name(f".{key}.{uuid4().hex}{PARTIAL}")
            try:
                place.rename(aside)
            except OSError:
                continue
            if aside.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink(missing_ok=True)


def _read_note(folder: Path) -> KernelNote:
    return KernelNote(**json.loads((folder / NOTE).read_text(encoding="utf-8")))


def code_digest(package: Path) -> str:
    """SHA-256 of a file of code."""
    return hashlib.sha256(package.read_bytes()).hexdigest()


def _processor() -> str:
    """The kind of processor: code is made for what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return f"{platform.machine()} {' '.join(told)}"
