#!/usr/bin/env bash
# Runs the S3 driver's tests against a real server: installs Ceph's S3 gateway if it is missing, starts a server on free
# ports, runs the tests, and stops it. TRIAL=writers and TRIAL=faults run one of the long trials instead. If no server
# can be started, the script says so and succeeds, because the tests have run on moto.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

skip() {
  echo "test-ceph: SKIPPED, the tests ran on moto only: $1"
  exit 0
}

for tool in radosgw ceph-mon ceph-osd ceph; do
  command -v $tool >/dev/null && continue
  [ "$(id -u)" = 0 ] || skip "$tool is not installed, and only root may install it (tests/servers/install-ceph.sh)"
  command -v apt-get >/dev/null || skip "$tool is not installed, and there is no apt-get"
  sh tests/servers/install-ceph.sh || skip "Ceph's packages cannot be installed"
  break
done

work=$(mktemp -d)
read -r RGW_PORT MON_PORT < <($PYTHON -c 'from tests.backends.s3.faults import free_ports; print(free_ports(), free_ports())')
export D=$work/ceph RGW_PORT MON_PORT
cleanup() {
  bash tests/servers/ceph.sh stop >/dev/null 2>&1 || true
  bash tests/servers/ceph.sh kill9 >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap cleanup EXIT
bash tests/servers/ceph.sh init || { tail -5 "$D"/*.out || true; skip "the server did not start"; }
export PERSISTKV_S3_ENDPOINT=http://127.0.0.1:$RGW_PORT PERSISTKV_S3_CEPH=$D
export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=testsecret
case ${TRIAL:-tests} in
tests)
  $PYTHON -m pytest tests/backends/s3 tests/e2e/test_sharing.py "$@" \
    --deselect tests/backends/s3/test_options.py --deselect tests/backends/s3/test_credentials.py \
    --deselect tests/backends/s3/test_transport.py  # they need no server, or one that misbehaves
  $PYTHON -m tests.servers.writers --seconds "${SECONDS_OF_WRITING:-15}"
  ;;
writers) $PYTHON -m tests.servers.writers --seconds "${SECONDS_OF_WRITING:-120}" "$@" ;;
faults) $PYTHON -m tests.servers.fault_table --endpoint "$PERSISTKV_S3_ENDPOINT" "$@" ;;
esac
