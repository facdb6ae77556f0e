"""Where an extra isn't installed, the tests that need it are left out and the header says so; no kernels are found."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

# kernels that somebody compiled ahead are none of the tests' business
os.environ["LEDE_KERNELS"] = str(Path(tempfile.gettempdir()) / f"no-kernels-of-{os.getpid()}")

NEEDS = {
    "d3rlpy": (
        *("lede/test_training*.py", "lede/test_benchmark.py", "lede/test_cli.py", "buffers/test_d3rlpy_view.py"),
        *("lede/test_replay_buffer.py", "lede/test_off_policy.py", "lede/test_evaluation.py", "lede/test_sweep.py"),
        *("lede/test_wall_clock.py", "test_demo.py", "test_readme.py"),
    ),
    "gymnasium": ("envs/*", "collectors/*", "lede/test_simulation.py", "lede/test_threshold_fit.py"),
    "zarr": (
        *("buffers/*", "collectors/*", "envs/*", "lede/test_simulation.py", "lede/test_round_behaviour.py"),
        *("lede/test_evaluation.py", "lede/test_off_policy.py", "lede/test_wall_clock.py"),
        "lede/test_threshold_fit.py",
    ),
    "ray": ("collectors/test_ray_workers.py",),
    "rouge_score": (
        *("lede/test_bench.py", "lede/test_bench_report.py", "lede/test_bench_rows.py"),
        *("lede/test_comparison.py", "lede/test_text_overlap.py"),
    ),
}

_left_out = {package: files for package, files in NEEDS.items() if find_spec(package) is None}
collect_ignore_glob = [name for files in _left_out.values() for name in files]


def pytest_report_header() -> list[str]:
    return [f"not installed: {package}; left out: {', '.join(files)}" for package, files in _left_out.items()]
