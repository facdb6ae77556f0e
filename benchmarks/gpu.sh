#!/usr/bin/env bash
# lede on one data-centre GPU, without network and in under six minutes: exactness, speed, and a table.
#
#   benchmarks/gpu.sh
#
# Collects both kinds of experience on the bundled model and fits policies; decodes the bundled model and random Llamas
# of the shapes of Llama-3.2-1B and Llama-2-7B whose early-exit agreement is planted (benchmarks/planted_model.py);
# compares the texts of plain decoding and of every policy with transformers' `generate`, in float32 with TF32 off and in
# bfloat16, where only a numerical tie may differ; times them side by side, eager and compiled; runs the GPU tests.
# What the machine lacks is skipped and named: gymnasium and zarr for collecting, d3rlpy for training, pytest for tests.
# A stage that fails or runs out of time is named too, and the others go on.
#
# Exit code: 0; 1 when a check of exactness failed; 2 when nothing could be run; 3 when something is missing.
#
# Environment, with defaults:
#   OUT      gpu-report; report.md, report.json and log.txt go there
#   WHEELS   a folder of wheels to install first, without network: gymnasium, zarr and what they need, perhaps d3rlpy
#   SHAPES   full; `tiny` for a small model in little time
#   DEVICE   cuda; SHAPES=tiny DEVICE=cpu tries the steps without a GPU
#   STAGES   all; of experience, bundled, llama-3.2-1b, llama-2-7b (or tiny), tests, separated by commas
#   COMPILE  1; 0 leaves out the compiled engine
#   PYTHON   python3
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu-report}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if [ -n "${WHEELS:-}" ]; then
    if ! compgen -G "$WHEELS/*.whl" > /dev/null; then
        echo "gpu: WHEELS '$WHEELS' holds no *.whl; give a folder of wheels, or leave it out" >&2
        exit 2
    fi
    # into a folder of their own, which a Python that its system manages allows too
    export PIP_TARGET="${PIP_TARGET:-$(realpath -m "$OUT")/packages}"
    export PYTHONPATH="$PIP_TARGET:$PYTHONPATH"
    # each by itself: one that doesn't fit this Python doesn't keep out the others
    for wheel in "$WHEELS"/*.whl; do
        "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "$wheel" ||
            echo "gpu: $(basename "$wheel") could not be installed; what needs it is skipped" >&2
    done
fi

options=()
if [ "${COMPILE:-1}" = 0 ]; then options+=(--no-compile); fi
if [ -n "${STAGES:-}" ]; then options+=(--stages "$STAGES"); fi
exec "$PYTHON" -m benchmarks.gpu_report --out "$OUT" --shapes "${SHAPES:-full}" --device "${DEVICE:-cuda}" "${options[@]}"
