#!/usr/bin/env bash
# Real vLLM engines over this plugin, in a virtual environment of their own (make setup-vllm). Where vLLM for CPUs cannot
# be installed this says so and succeeds: what of the plugin needs no vLLM has been tested all the same. TESTS=vllm runs
# the slow ones, too.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${VLLM_PYTHON:-${VLLM_VENV:-.venv-vllm-0.32.0}/bin/python}

skip() {
  echo "test-vllm: SKIPPED: $1"
  exit 0
}

[ -n "${VLLM_PYTHON:-}" ] || make --no-print-directory setup-vllm || skip "vLLM for CPUs cannot be installed here"
$PYTHON -c "import vllm" >/dev/null || skip "vLLM is installed and does not import"

# NEXT=DIRECTORY: the Python files of a newer release, for which the installed one has the dependencies. Its engines need
# compiled code that has no build for CPUs, so these are the tests without an engine.
if [ -n "${NEXT:-}" ]; then
  export PYTHONPATH="$NEXT${PYTHONPATH:+:$PYTHONPATH}"
  set -- tests/integrations/vllm/test_{manager,releases,spec,tier}.py "$@"
else
  set -- tests/integrations/vllm "$@"
fi
exec $PYTHON -m pytest -W default -o faulthandler_timeout=0 -m "${TESTS:-vllm and not slow}" "$@"
