#!/usr/bin/env bash
# Runs the conformance suite of media on a real shared file system: installs CephFS if it is missing, starts a server on
# free ports, mounts it twice through FUSE, as two machines would, and runs the tests with handles on both mounts. If it
# cannot be started, the script says so and succeeds, because the tests have run on a local directory. TRIAL=command runs
# another command while the mounts exist.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

skip() {
  echo "test-cephfs: SKIPPED, the tests ran on a local directory only: $1"
  exit 0
}

[ -e /dev/fuse ] || skip "there is no /dev/fuse"
[ "$(id -u)" = 0 ] || skip "only root may mount"
for tool in radosgw ceph-mon ceph-osd ceph ceph-mds ceph-fuse; do
  command -v $tool >/dev/null && continue
  command -v apt-get >/dev/null || skip "$tool is not installed, and there is no apt-get"
  sh tests/servers/install-ceph.sh || skip "Ceph's packages cannot be installed"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ceph-mds ceph-fuse >/dev/null ||
    skip "CephFS's packages cannot be installed"
  break
done

work=$(mktemp -d)
read -r RGW_PORT MON_PORT < <($PYTHON -c 'from tests.backends.s3.faults import free_ports; print(free_ports(), free_ports())')
export D=$work/ceph RGW_PORT MON_PORT CEPH_CONF=$work/ceph/ceph.conf
daemons=()
cleanup() {
  for mount in one two; do
    umount "$work/$mount" 2>/dev/null || umount -l "$work/$mount" 2>/dev/null || true
  done
  for pid in "${daemons[@]}"; do
    kill -9 "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  bash tests/servers/ceph.sh stop >/dev/null 2>&1 || true
  bash tests/servers/ceph.sh kill9 >/dev/null 2>&1 || true
  rm -rf "$work/ceph"
  rmdir "$work/one" "$work/two" "$work" 2>/dev/null || true # never the content of a mount
}
trap cleanup EXIT
bash tests/servers/ceph.sh init || { tail -5 "$D"/*.out || true; skip "the server did not start"; }

timeout 60 ceph osd pool create fs_metadata 8 >/dev/null 2>&1
timeout 60 ceph osd pool create fs_data 8 >/dev/null 2>&1
timeout 60 ceph fs new shared fs_metadata fs_data >/dev/null 2>&1 || skip "the file system could not be created"
mkdir -p "$D/mds" "$work/one" "$work/two"
ceph-mds -i a -f --mds-data "$D/mds" >"$D/mds.out" 2>&1 &
daemons+=($!)
for _ in $(seq 100); do
  timeout 10 ceph mds stat 2>/dev/null | grep -q 'up:active' && break
  sleep 0.3
done
for mount in one two; do
  ceph-fuse -f -n client.admin "$work/$mount" >>"$D/fuse.out" 2>&1 &
  daemons+=($!)
done
for mount in one two; do
  for _ in $(seq 100); do
    mountpoint -q "$work/$mount" && continue 2
    sleep 0.3
  done
  tail -5 "$D/fuse.out"
  skip "the file system could not be mounted"
done

export PERSISTKV_SHARED_MOUNTS=$work/one:$work/two
case ${TRIAL:-tests} in
tests) $PYTHON -m pytest tests/backends/dir/test_conformance.py -k OnTwoMounts "$@" ;;
command) "$@" ;; # anything that uses $PERSISTKV_SHARED_MOUNTS
esac
