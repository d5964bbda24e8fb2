#!/usr/bin/env bash
# Tests of the plugin with real vLLM engines, in a separate virtual environment (make setup-vllm). If vLLM for CPUs
# cannot be installed, this prints a message and succeeds; the tests that need no vLLM are part of `make test`.
# TESTS=vllm also runs the slow tests.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${VLLM_PYTHON:-${VLLM_VENV:-.venv-vllm-0.32.0}/bin/python}

skip() {
  echo "test-vllm: SKIPPED: $1"
  exit 0
}

[ -n "${VLLM_PYTHON:-}" ] || make --no-print-directory setup-vllm || skip "vLLM for CPUs cannot be installed here"
$PYTHON -c "import vllm" >/dev/null || skip "vLLM is installed and does not import"

# NEXT=DIRECTORY: the Python files of a newer release, used with the dependencies of the installed one. Engines of that
# release need compiled code that has no build for CPUs, so only the tests without an engine run.
if [ -n "${NEXT:-}" ]; then
  export PYTHONPATH="$NEXT${PYTHONPATH:+:$PYTHONPATH}"
  set -- tests/integrations/vllm/test_{manager,releases,spec,tier}.py "$@"
else
  set -- tests/integrations/vllm "$@"
fi
exec $PYTHON -m pytest -W default -o faulthandler_timeout=0 -m "${TESTS:-vllm and not slow}" "$@"
