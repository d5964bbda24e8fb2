"""Recording of encryptions, and a short run of engines that are killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import aead

from benchmarks import keys
from persistkv.storage.format.keys import DataKey, StoreKey
from persistkv.storage.format.seal import KeySeal
from persistkv.tenants import DEFAULT_TENANT

NAMESPACE = bytes(16)
KEYRING = StoreKey(b"k" * 32).new_keyring().extended([DataKey.new(DEFAULT_TENANT)])
SEAL = KeySeal(lambda: KEYRING)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    directory = tmp_path / "records"
    directory.mkdir()
    return directory


def seal_some(records: Path) -> tuple[int, int]:
    """Seal packs and records; return what was recorded."""
    for name in ("first", "second"):
        with keys.recorded(records / name):
            for _ in range(3):
                pack = keys.new_pack(NAMESPACE, SEAL)
                assert list(pack.stream())
                SEAL.encode_table(pack.table)
    return keys.count_recorded(records)


def test_count_recorded_counts_every_encryption(records: Path) -> None:
    original = aead.AESGCM
    # a frame and a table of each pack
    assert seal_some(records) == (12, 0)
    assert aead.AESGCM is original


def test_count_recorded_finds_repeated_salts(
    records: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = os.urandom(64)
    monkeypatch.setattr(os, "urandom", lambda length: drawn[:length])
    num_encryptions, num_repeated = seal_some(records)
    assert num_encryptions == 12
    # one AES key for all frames, and one for all tables
    assert num_repeated == 10


def test_engines_killed_and_rotated_repeat_no_nonce(
    tmp_path: Path,
    records: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(keys.OLD, "k" * 32)
    monkeypatch.setenv(keys.NEW, "n" * 32)
    url = f"lmdb://{tmp_path}/store?capacity=1GiB&placement=inline"
    engines = keys.Engines(f"{url}&key_env={keys.OLD}", records, 2)
    try:
        num_packs = keys.fill(engines, 1_000, kill_s=0.5)
        # a fast machine fills the store before the first kill
        num_packs += keys.count(engines.kill_one())
        num_packs += keys.fill(engines, 1_000, kill_s=0.5)
        rotation = keys.rotate(engines, url, watch_s=1.0)
    finally:
        engines.end()
    assert engines.num_kills >= 1
    assert rotation.before
    assert rotation.seconds < keys.TARGET_S
    assert keys.held_packs(url) >= num_packs
    num_encryptions, num_repeated = keys.count_recorded(records)
    assert num_encryptions > 2 * num_packs
    assert num_repeated == 0
