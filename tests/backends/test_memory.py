"""A store in memory: its handles, and what the package of tools for tests imports. ``test_faulty``
runs the suite."""

import subprocess
import sys
from contextlib import closing

from persistkv.storage.backend import CommitBatch
from persistkv.testing import MemoryBackend, MemoryBlobs
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_pack


def test_memory_backend_each_instance_is_separate_store() -> None:
    with closing(MemoryBackend()) as first, closing(MemoryBackend()) as second:
        namespace = first.open_namespace(sample_identity()).id
        first.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        assert not list(second.namespaces())


def test_memory_backend_on_same_blobs_finds_content_of_closed_handle() -> None:
    blobs = MemoryBlobs()
    with closing(MemoryBackend(blobs)) as first:
        namespace = first.open_namespace(sample_identity()).id
        pack = sample_pack(namespace, 1)
        first.commit(namespace, CommitBatch([pack]))
    with closing(MemoryBackend(blobs.handle())) as second:
        second.open_namespace(sample_identity())
        assert tables(second, namespace) == {pack.pack_id: pack.table}
        assert read_pack(second, namespace, pack.table) == payload_of(pack)


def test_import_testing_package_loads_neither_torch_nor_pytest() -> None:
    code = (
        "import sys, persistkv.testing; print([name for name in ('torch', 'pytest') if name "
        "in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
