#!/usr/bin/env bash
# The tables of the LEDE paper (arXiv 2606.03113) on models trained by the LayerSkip recipe, in one command.
#
#   TRAIN=train.jsonl SUITES="humaneval:HumanEval.jsonl.gz cnn-dm:cnn_dm.jsonl lm:cnn_dm_text.jsonl" \
#       benchmarks/layerskip_llama.sh
#
# For each model: traces with branches of the training prompts, a cost profile, a policy trained for seconds and one for
# the paper's reward, then all rivals side by side (tables 1 and 2) and the ablation (table 3). Suites `lm` are sampled
# at temperature 0.6, with policies trained at it; the others are greedy. What is finished is not done again: the same
# command goes on with a run that was stopped.
#
# The weights are gated: accept the licence of each model on the hub, then `hf auth login`.
#
#   DRY_RUN=1 MODEL=FOLDER benchmarks/layerskip_llama.sh
#
# runs the same steps in small on a CPU, with the tiny model of a folder and prompts of its own.
#
# Environment, with defaults:
#   MODELS         facebook/layerskip-llama2-7B; hub ids or folders, separated by spaces. The paper's others:
#                  facebook/layerskip-llama3.2-1B layerskip-llama2-13B layerskip-codellama-7B layerskip-codellama-34B
#   TRAIN          prompts to train on, .jsonl or .txt; none of them may be in a suite
#   SUITES         suites of `lede bench`, separated by spaces
#   OUT            runs/layerskip
#   N_PROMPTS      100 test prompts of each suite
#   N_TRAIN        200 training prompts
#   N_VALIDATION   16 prompts of each suite that everybody is tuned on
#   TOKENS         512 new tokens a prompt
#   CANDIDATES     candidate layers, such as 4,6,8,10,12; the default of `lede collect` unless given
#   DTYPE, DEVICE  float16, cuda
#   PYTHON         python
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
OUT=${OUT:-runs/layerskip}
DRY_RUN=${DRY_RUN:-0}
if [ "$DRY_RUN" = 1 ]; then
    if [ -z "${MODEL:-}" ]; then
        echo "layerskip_llama: a dry run needs MODEL, the folder of a tiny model" >&2
        exit 2
    fi
    MODELS=$MODEL
    TRAIN=${TRAIN:-$OUT/prompts/train.jsonl}
    SUITES=${SUITES:-humaneval:$OUT/prompts/humaneval.jsonl lm:$OUT/prompts/lm.jsonl}
    N_PROMPTS=${N_PROMPTS:-2} N_TRAIN=${N_TRAIN:-16} N_VALIDATION=${N_VALIDATION:-1} TOKENS=${TOKENS:-16}
    DTYPE=${DTYPE:-float32} DEVICE=${DEVICE:-cpu}
    SMALL_PROFILE=(--contexts 16 --repeats 1)
    SMALL_TRAINING=(--steps 20 --batch-size 16 --eval-interval 20 --refresh-interval 10 --checkpoint-interval 10
        --min-exits 1)
    SMALL_BENCH=(--profile-repeats 1)
else
    MODELS=${MODELS:-facebook/layerskip-llama2-7B}
    N_PROMPTS=${N_PROMPTS:-100} N_TRAIN=${N_TRAIN:-200} N_VALIDATION=${N_VALIDATION:-16} TOKENS=${TOKENS:-512}
    DTYPE=${DTYPE:-float16} DEVICE=${DEVICE:-cuda}
    SMALL_PROFILE=() SMALL_TRAINING=() SMALL_BENCH=()
    for name in TRAIN SUITES; do
        if [ -z "${!name:-}" ]; then
            echo "layerskip_llama: set $name; the head of $0 says to what" >&2
            exit 2
        fi
    done
fi
CANDIDATES=${CANDIDATES:-}
RIVALS=(static threshold draft-verify del swift conflayers assistant-early-exit prompt-lookup)

lede() {
    echo "+ lede $*" >&2
    "$PYTHON" -m lede.cli "$@"
}

# collect, train and measure one model at one temperature
tables() {
    local model=$1 temperature=$2 folder=$3
    shift 3
    local suites=() policies=() run
    for suite in "$@"; do suites+=(--suite "$suite"); done

    lede collect --model "$model" --collector teacher --prompts "$TRAIN" --episodes "$N_TRAIN" \
        --max-new-tokens "$TOKENS" --temperature "$temperature" --out "$folder/traces.zarr" \
        ${CANDIDATES:+--candidates "$CANDIDATES"} --dtype "$DTYPE" --device "$DEVICE"
    for objective in wall-clock paper; do
        run=$folder/$objective
        lede train --buffer "$folder/traces.zarr" --objective "$objective" --profile "$(dirname "$folder")/profile.json" \
            --out "$run" --resume "${SMALL_TRAINING[@]}"
        policies+=(--policy "$run/policy")
    done
    local common=(--model "$model" "${suites[@]}" --n-prompts "$N_PROMPTS" --validation-prompts "$N_VALIDATION"
        --max-new-tokens "$TOKENS" --temperature "$temperature" --dtype "$DTYPE" --device "$DEVICE" "${SMALL_BENCH[@]}")
    local rivals=()
    for rival in "${RIVALS[@]}"; do rivals+=(--policy "$rival"); done
    lede bench "${common[@]}" "${rivals[@]}" "${policies[@]}" --sweep static --out "$folder/bench"
    lede bench "${common[@]}" "${policies[@]}" --preset ablation --out "$folder/ablation"
}

for model in $MODELS; do
    check=(--model "$model" --out "$OUT")
    if [ "$DRY_RUN" = 1 ]; then check+=(--dry-run); fi
    "$PYTHON" -m benchmarks.layerskip_check "${check[@]}"
done
for model in $MODELS; do
    folder=$OUT/$(basename "$model")
    mkdir -p "$folder"
    if [ ! -e "$folder/profile.json" ]; then
        lede profile --model "$model" --out "$folder/profile.json" ${CANDIDATES:+--candidates "$CANDIDATES"} \
            --dtype "$DTYPE" --device "$DEVICE" "${SMALL_PROFILE[@]}"
    fi
    greedy=() sampled=()
    for suite in $SUITES; do
        case $suite in
            lm:*) sampled+=("$suite") ;;
            *) greedy+=("$suite") ;;
        esac
    done
    if [ ${#greedy[@]} -gt 0 ]; then tables "$model" 0 "$folder/greedy" "${greedy[@]}"; fi
    if [ ${#sampled[@]} -gt 0 ]; then tables "$model" 0.6 "$folder/sampled" "${sampled[@]}"; fi
done
find "$OUT" -name report.md
