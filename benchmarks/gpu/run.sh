#!/usr/bin/env bash
# Tests and benchmarks on a machine with a GPU, in less than ten minutes:
#
#   benchmarks/gpu/run.sh [OUT]
#
# OUT receives results.jsonl and results.txt (each figure as soon as it is measured), tests.txt, log.txt (all output)
# and steps.txt (status of each step). A step that reaches its time limit is stopped; its files are kept, and the next
# step starts.
#
# Installs the wheels of `make gpu-kit`, if there are any; downloads nothing. Settings:
#   PYTHON   the interpreter, with torch and transformers (python3)
#   KIT      the folder with the wheels (.gpu-kit)
#   STORES   a directory on the disk to measure, for temporary stores (build)
#   SMOKE    tiny sizes, to check that every step runs: on this device, cpu or cuda
set -u
cd "$(dirname "$0")/../.."

# step                  limit in seconds
readonly INSTALL=20
readonly MACHINE=10
readonly TESTS=115
readonly COPIES=55
readonly KERNELS=40
readonly TTFT=150
readonly RESTORE=80
readonly COST=65
readonly SANITIZER=40 # and the time that earlier steps left
readonly TOTAL=575    # sum of all limits: the longest possible run

PYTHON=${PYTHON:-python3}
KIT=${KIT:-.gpu-kit}
OUT=$(mkdir -p "${1:-${OUT:-build/gpu}}" && cd "${1:-${OUT:-build/gpu}}" && pwd) || exit 1
SMOKE=${SMOKE:-}
SITE=$(mktemp -d) || exit 1
STORES=$(mkdir -p "${STORES:-build}" && realpath "$(mktemp -d -p "${STORES:-build}")") || exit 1
# The code comes from this source tree; the kit adds missing packages, and persistkv's entry points.
export PYTHONPATH="$PWD:$PWD/backends:$PWD/tools:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$PATH:/usr/local/cuda/bin"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec > >(tee -a "$OUT/log.txt") 2>&1
tee=$!
trap 'rm -rf "$SITE" "$STORES"; exec >&- 2>&-; wait "$tee"' EXIT

failed=0
step() { # NAME LIMIT COMMAND...
    local name=$1 limit=$2 left=$((TOTAL - SECONDS)) begin=$SECONDS code=0 ended
    shift 2
    ((limit > left)) && limit=$left
    if ((limit <= 0)); then
        ended="not started: no time left"
        failed=1
    else
        printf '\n== %s (%d s at most)\n' "$name" "$limit"
        timeout --kill-after=5 "$limit" "$@" || code=$?
        case $code in
            0) ended=ok ;;
            124 | 137) ended="ended at its limit of $limit s" failed=1 ;;
            *) ended="failed with status $code" failed=1 ;;
        esac
    fi
    printf '%-12s %4d s  %s\n' "$name" $((SECONDS - begin)) "$ended" | tee -a "$OUT/steps.txt"
}

install() {
    if compgen -G "$KIT/*.whl" >/dev/null; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --disable-pip-version-check --target "$SITE" "$KIT"/*.whl
    else
        echo "no wheels in $KIT: using the installed packages"
    fi
    "$PYTHON" -m benchmarks.gpu.kit --check
}

machine() {
    uname -a
    nvidia-smi || echo "no nvidia-smi"
    nvcc --version | tail -n 2
    free -g
    grep -E 'Node|present|managed' /proc/zoneinfo # memory in the Movable zone cannot be pinned
    cat /sys/kernel/mm/transparent_hugepage/{enabled,shmem_enabled}
    df -hT . /dev/shm "$STORES"
}

# Rows of the primary tier are files in /dev/shm; containers often limit it to 64 MiB.
shm_gib=$(df --output=size -BG /dev/shm | tail -n 1 | tr -dc 0-9)
if [[ -z $SMOKE ]] && ((shm_gib < 24)); then
    echo "/dev/shm has $shm_gib GiB: enlarging it"
    mount -o remount,size=24G /dev/shm || echo "refused: longer contexts will be skipped"
fi

device=(--device cuda)
[[ -n $SMOKE ]] && device=(--device "$SMOKE" --smoke)
tests=("$PYTHON" -m pytest -m cuda -W default -p no:cacheprovider --timeout 60 --timeout-method signal --durations 5)
benchmark() { # MODULE
    exec "$PYTHON" -m "benchmarks.gpu.$1" "${device[@]}" --out "$OUT" --directory "$STORES"
}
run_tests() {
    "${tests[@]}" tests 2>&1 | tee "$OUT/tests.txt"
    return "${PIPESTATUS[0]}"
}
# Driver errors are ignored, because tests provoke them on purpose; out-of-bounds accesses fail the step.
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return 0; }
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        "${tests[@]}" --timeout 40 tests/cpu/devices/test_cuda_batch.py
}
export -f install machine benchmark run_tests sanitize
export PYTHON KIT OUT STORES SITE
call() { # FUNCTION [ARGUMENT]: prints a script for a separate shell, which `timeout` can end
    echo "$(declare -p device tests); $*"
}

step install "$INSTALL" bash -c install
step machine "$MACHINE" bash -c machine
step tests "$TESTS" bash -c "$(call run_tests)"
step copies "$COPIES" bash -c "$(call benchmark worker_copies)"
step kernels "$KERNELS" bash -c "$(call benchmark kernel_slowdown)"
step ttft "$TTFT" bash -c "$(call benchmark ttft)"
step restore "$RESTORE" bash -c "$(call benchmark restore)"
step cost "$COST" bash -c "$(call benchmark persistence_cost)"
step sanitizer $((TOTAL - SECONDS)) bash -c "$(call sanitize)"

echo
"$PYTHON" -m benchmarks.gpu.results "$OUT"
cat "$OUT/steps.txt"
exit "$failed"
