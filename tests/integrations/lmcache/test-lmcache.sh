#!/usr/bin/env bash
# Tests of the LMCache adapter with LMCache itself, in the virtual environment LMCACHE_VENV that make creates.
# The server that is killed takes minutes: `-m ""` adds it.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export LMCACHE_TRACK_USAGE=false DO_NOT_TRACK=1
"$LMCACHE_VENV/bin/python" -m pytest -q -m "not slow" -W ignore::DeprecationWarning tests/integrations/lmcache "$@"
