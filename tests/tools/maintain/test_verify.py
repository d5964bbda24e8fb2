from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.inspection.pack_tables import NamespacePacks
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_tools.maintain.integrity import (
    Verifier,
    VerifyState,
    check_manifests,
    count_rows,
    packs_left,
    read_catalogues,
)
from persistkv_tools.maintain.verify import Repaired, repair_packs
from persistkv_tools.packs import Defect, Problem
from tests.memory_store import (
    flip,
    payload,
    set_manifest_row,
    set_table_row,
    swap_payloads,
)
from tests.storage.statuses import make_status
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.damage import Damage, store_with_a_bad_pack
from tests.tools.middle_pack import MiddlePack
from tests.tools.signals import obey_ctrl_c, run_interrupted

URL = "lmdb:///here"


def ignore(num_bytes: int) -> None:
    pass


@pytest.fixture
def memory(memory_store: Callable[[], MemoryBackend]) -> tuple[MemoryBackend, Contexts]:
    backend = memory_store()
    writer = Contexts(backend, groups=2, codec=ZstdCodec(1))
    for number in range(6):
        writer.add(f"r{number}", f"a b c{number} d{number}")
    return backend, writer


INTERRUPTED_SCAN = """
from contextlib import closing
from persistkv.storage.backend import Capabilities
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv_tools.maintain.integrity import Verifier, VerifyState, packs_left, read_catalogues
from tests.tools.contexts import Contexts

memory = MemoryBackend()
memory.capabilities = Capabilities(remote=True)
backend = FaultyBackend.of(memory)
backend.before("read", lambda *_: time.sleep(3600))
writer = Contexts(backend)
for number in range(8):
    writer.add(str(number), f"a{number}")
spaces = read_catalogues(backend)
state = VerifyState.begin("lmdb:///here", 1.0)
interrupt_in(0.3)
begin = time.monotonic()
try:
    with closing(Verifier(backend, packs_left(spaces, state), state, lambda num_bytes: None, 4, batch_bytes=1)) as verifier:
        list(verifier.packs())
except KeyboardInterrupt:
    print(time.monotonic() - begin)
"""


def findings(backend: Backend, state: VerifyState | None = None) -> list[Defect]:
    state = state or VerifyState.begin(URL, 1.0)
    spaces = read_catalogues(backend)
    for _ in Verifier(backend, packs_left(spaces, state), state, ignore).packs():
        pass
    return [
        *(count_rows(backend, spaces) or []),
        *check_manifests(backend, spaces, ignore)[1],
        *state.findings,
    ]


class TestVerifierFindings:
    def test_intact_store_has_no_findings(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        assert findings(memory[0]) == []

    def test_flipped_payload_byte_is_reported(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        """Payloads consist of frames, some of them compressed, and of the padding between them."""
        backend, writer = memory
        pack = writer.packs["r0"]
        for position in range(0, len(payload(backend, writer.namespace, pack)), 97):
            flip(backend, writer.namespace, pack, position, 0x10)
            (found,) = findings(backend)
            assert found.problem in (Problem.PAYLOAD, Problem.PADDING)
            assert found.pack == pack.hex()
            flip(backend, writer.namespace, pack, position, 0x10)
        assert findings(backend) == []

    def test_swapped_payloads_are_both_reported(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = memory
        one, other = writer.packs["r1"], writer.packs["r2"]
        swap_payloads(backend, writer.namespace, one, other)
        found = findings(backend)
        assert {finding.pack for finding in found} == {one.hex(), other.hex()}

    def test_unreadable_rows_are_counted_by_kind(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = memory
        for name in ("r3", "r4"):
            set_table_row(backend, writer.namespace, writer.packs[name], b"no table")
        set_manifest_row(backend, writer.namespace, "r0", "manifests", b"no head")
        set_manifest_row(backend, writer.namespace, "r1", "manifest_keys", b"no keys")
        found = findings(backend)
        assert {
            (finding.problem, finding.count, finding.request) for finding in found
        } == {
            (Problem.PACK_ROWS, 2, None),
            (Problem.MANIFEST_ROWS, 1, None),
            (Problem.MANIFEST_KEYS, 1, "r1"),
            (Problem.MISSING_BLOCKS, 1, "r3"),
            (Problem.MISSING_BLOCKS, 1, "r4"),
        }

    def test_request_without_packs_is_reported_as_missing_blocks(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = memory
        backend.commit(
            writer.namespace, CommitBatch(manifests=[sample_manifest("ghost")])
        )
        (found,) = findings(backend)
        assert (found.problem, found.request) == (Problem.MISSING_BLOCKS, "ghost")
        assert found.detail == "no pack holds 3 of its blocks"


class TestConcurrentChanges:
    def test_verifier_pack_deleted_meanwhile_is_not_reported(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = memory
        spaces = read_catalogues(backend)
        state = VerifyState.begin(URL, 1.0)
        backend.commit(writer.namespace, CommitBatch(deletions=[writer.packs["r3"]]))
        for _ in Verifier(backend, packs_left(spaces, state), state, ignore).packs():
            pass
        assert (state.findings, state.went_meanwhile, state.packs) == ([], 1, 6)
        assert check_manifests(backend, spaces, ignore) == (5, [])

    @pytest.mark.parametrize("damaged", [False, True])
    def test_verifier_pack_replaced_meanwhile_is_reported_only_if_new_content_is_damaged(
        self,
        memory: tuple[MemoryBackend, Contexts],
        damaged: bool,
    ) -> None:
        backend, writer = memory
        pack = sample_pack(writer.namespace, 77)
        backend.commit(writer.namespace, CommitBatch([pack]))
        spaces = read_catalogues(backend)
        again = sample_pack(writer.namespace, 77, content=78)
        backend.commit(writer.namespace, CommitBatch([again], deletions=[pack.pack_id]))
        if damaged:
            flip(backend, writer.namespace, again.pack_id, 0)
        state = VerifyState.begin(URL, 1.0)
        for _ in Verifier(backend, packs_left(spaces, state), state, ignore).packs():
            pass
        assert [finding.pack for finding in state.findings] == [
            again.pack_id.hex()
        ] * damaged
        assert state.went_meanwhile == (not damaged)

    def test_count_rows_concurrent_commits_returns_none(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, _ = memory
        busy = FaultyBackend.of(backend)

        def write(namespace: bytes) -> None:
            seed = 100 + busy.calls.count("catalogue")
            backend.commit(namespace, CommitBatch([sample_pack(namespace, seed)]))

        busy.before("catalogue", write)
        assert count_rows(busy, read_catalogues(busy)) is None

    def test_repair_packs_pack_intact_again_is_kept(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = memory
        bad, healed = writer.packs["r1"], writer.packs["r2"]
        for pack in (bad, healed):
            flip(backend, writer.namespace, pack, 0)
        spaces = read_catalogues(backend)
        state = VerifyState.begin(URL, 1.0)
        verifier = Verifier(backend, packs_left(spaces, state), state, ignore)
        for _ in verifier.packs():
            pass
        assert {finding.pack for finding in state.findings} == {bad.hex(), healed.hex()}
        flip(backend, writer.namespace, healed, 0)
        repair_packs(backend, state.findings, repaired := Repaired())
        assert repaired.packs == [bad]
        assert (repaired.shortened, repaired.deleted) == (
            {(writer.namespace, "r1")},
            set(),
        )
        assert NamespacePacks(backend, writer.namespace).tables.keys() == set(
            writer.packs.values()
        ) - {bad}
        assert findings(backend) == []

    def test_repair_packs_failed_commit_lists_earlier_deletions(
        self, memory: tuple[MemoryBackend, Contexts]
    ) -> None:
        """The first bad pack is deleted; the commit that deletes the second one fails."""
        backend, writer = memory
        first, second = sorted(writer.packs[name] for name in ("r1", "r2"))
        for pack in (first, second):
            flip(backend, writer.namespace, pack, 0)
        faulty = FaultyBackend.of(backend)
        spaces = read_catalogues(faulty)
        state = VerifyState.begin(URL, 1.0)
        list(Verifier(faulty, packs_left(spaces, state), state, ignore).packs())

        def fail(namespace: bytes, batch: CommitBatch) -> None:
            if second in batch.bad:
                raise StoreError("the disk is gone")

        faulty.before("commit", fail)
        repaired = Repaired()
        with pytest.raises(StoreError):
            repair_packs(faulty, state.findings, repaired)
        assert (repaired.packs, len(repaired.shortened), repaired.deleted) == (
            [first],
            2,
            set(),
        )


def test_verifier_pack_of_later_portion_deleted_meanwhile_is_skipped(
    memory: tuple[MemoryBackend, Contexts],
) -> None:
    backend, writer = memory
    spaces = read_catalogues(backend)
    state = VerifyState.begin(URL, 1.0)
    verifier = Verifier(
        backend, packs_left(spaces, state), state, ignore, portion_bytes=1
    )
    verifier.begin()
    last = max(writer.packs.values())
    backend.commit(writer.namespace, CommitBatch(deletions=[last]))
    # applies the deletion
    assert count_rows(backend, spaces) == []
    assert len(list(verifier.packs())) == 6
    assert state.packs == 5
    assert state.findings == []


class TestResume:
    def test_verifier_saved_state_checks_only_remaining_packs(
        self, memory: tuple[MemoryBackend, Contexts], tmp_path: Path
    ) -> None:
        backend, writer = memory
        flip(backend, writer.namespace, min(writer.packs.values()), 0)
        file = tmp_path / "state"
        state = VerifyState.load(file, URL, 1.0)
        packs = packs_left(read_catalogues(backend), state)
        first = Verifier(backend, packs, state, ignore, portion_bytes=1)
        run = first.packs()
        for _ in range(2):
            next(run)
        state.save(file)
        state = VerifyState.load(file, URL, 1.0)
        spaces = read_catalogues(backend)
        packs = packs_left(spaces, state)
        assert len(packs) == 4
        verifier = Verifier(backend, packs, state, ignore, portion_bytes=1)
        assert len(list(verifier.packs())) == 4
        assert state.packs == 6
        assert len(state.findings) == 1

    def test_verify_state_draws_same_sample_each_time(self) -> None:
        names = [bytes([number, 7]) * 8 for number in range(200)]
        state = VerifyState.begin(URL, 0.3)
        drawn = {name for name in names if state.draws(name)}
        assert 20 < len(drawn) < 110
        assert drawn == {name for name in names if state.draws(name)}
        assert all(VerifyState.begin(URL, 1.0).draws(name) for name in names)

    def test_verify_foreign_state_file_exits_2(
        self, run: Run, filled: str, tmp_path: Path
    ) -> None:
        VerifyState.begin("lmdb:///elsewhere", 1.0).save(tmp_path / "other")
        (tmp_path / "text").write_text("hello")
        for name, error in (
            ("other", "--resume"),
            ("text", "cannot read text: it is not a progress file of verify"),
        ):
            done = run("verify", filled, "--resume", name)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert error in done.stderr

    def test_verify_interrupted_exits_130_and_resumes_from_state_file(
        self,
        run: Run,
        contexts: tuple[str, Contexts],
        tmp_path: Path,
    ) -> None:
        url, writer = contexts
        for number in range(16):
            writer.add(f"r{number}", " ".join(f"{number}-{word}" for word in range(32)))
        slow = [
            sys.executable,
            "-m",
            "persistkv_tools",
            "verify",
            url,
            "--rate",
            "64KiB",
            "--resume",
            "state",
        ]
        process = subprocess.Popen(
            slow,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=obey_ctrl_c,
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "state").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert VerifyState.load(tmp_path / "state", url, 1.0).packs < 16
        found = json.loads(run("verify", url, "--resume", "state", "--json").stdout)
        assert (found["packs"], found["problems"]) == (16, 0)
        assert not (tmp_path / "state").exists()

    def test_verifier_interrupted_remote_reads_do_not_delay_exit(self) -> None:
        """Each read has its own buffer and ends by the driver's deadline at the latest."""
        seconds = run_interrupted(INTERRUPTED_SCAN)
        assert float(seconds) < 10

    def test_verify_unwritable_state_file_exits_2(self, run: Run, filled: str) -> None:
        done = run("verify", filled, "--resume", "absent/state")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "absent/state" in done.stderr

    def test_verify_resumed_rate_excludes_bytes_read_before(
        self,
        run: Run,
        contexts: tuple[str, Contexts],
        tmp_path: Path,
    ) -> None:
        url, writer = contexts
        writer.add("one", "a b c")
        earlier = VerifyState.load(tmp_path / "state", url, 1.0)
        earlier.packs, earlier.stored_bytes = 1, 1 << 40
        earlier.after = "f" * 64
        earlier.save(tmp_path / "state")
        done = run("verify", url, "--resume", "state")
        assert done.returncode == 0
        assert "(0 B/s)" in done.stdout
        assert (
            "this includes 1 pack (1.0 TiB) that earlier, interrupted runs read"
            in done.stdout
        )
        earlier.save(tmp_path / "state")
        found = json.loads(run("verify", url, "--resume", "state", "--json").stdout)
        assert (
            found["stored_bytes"],
            found["resumed_bytes"],
            found["resumed_packs"],
        ) == (1 << 40, 1 << 40, 1)
        fresh = run("verify", url)
        assert "interrupted" not in fresh.stdout

    def test_verify_completed_deletes_state_file(
        self, run: Run, filled: str, tmp_path: Path
    ) -> None:
        assert run("verify", filled, "--resume", "state").returncode == 0
        assert not (tmp_path / "state").exists()


class TestVerifyCommand:
    def test_intact_store_open_elsewhere_exits_0(
        self, run: Run, contexts: tuple[str, Contexts]
    ) -> None:
        url, writer = contexts
        writer.add("one", "a b c")
        done = run("verify", url)
        assert (done.returncode, done.stderr) == (0, "")
        assert "no problems found" in done.stdout
        found = json.loads(run("verify", url, "--json", "--rate", "100MiB").stdout)
        assert (
            found["packs"],
            found["requests"],
            found["problems"],
            found["rows_counted"],
        ) == (1, 1, 0, True)
        assert found["stored_bytes"] == 3 * 4096

    def test_live_engine_limits_share_of_time(self, run: Run, url: str) -> None:
        with closing(open_backend(url)) as backend:
            Contexts(backend).add("one", "a b c")
            backend.publish_status(
                "live", make_status("live", time=time.time()).encode()
            )
            backend.publish_status("gone", make_status("gone", time=0.0).encode())
            done = run("verify", url)
            assert (
                "reads were limited to 5 % of the time; 1 engine used the store"
                in done.stdout
            )
            assert "no problems found" in done.stdout
            assert (
                json.loads(run("verify", url, "--json").stdout)["beside_engines"] == 1
            )
            backend.publish_status("live", None)
            assert (
                json.loads(run("verify", url, "--json").stdout)["beside_engines"] == 0
            )

    def test_live_engine_with_rate_limits_bytes_per_second(
        self, run: Run, url: str
    ) -> None:
        with closing(open_backend(url)) as backend:
            Contexts(backend).add("one", "a b c")
            backend.publish_status(
                "live", make_status("live", time=time.time()).encode()
            )
            shown = run("verify", url, "--rate", "200MiB").stdout
        assert "reads were limited to 200.0 MiB/s; 1 engine used the store" in shown
        assert "5 %" not in shown

    def test_bad_pack_is_reported_until_repair_deletes_it(
        self, run: Run, url: str
    ) -> None:
        bad = store_with_a_bad_pack(url)
        done = run("verify", url)
        assert done.returncode == 1
        assert bad.hex()[:8] in done.stdout
        assert "found 1 problem" in done.stdout
        refused = run("verify", url, "--repair")
        assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
        done = run("verify", url, "--repair", "--yes", "--json")
        assert done.returncode == 1
        assert json.loads(done.stdout)["deleted_packs"] == 1
        assert run("verify", url).returncode == 0
        left = json.loads(run("ls", url, "--json").stdout)["requests"]
        assert [request["id"] for request in left] == ["two"]

    def test_repair_bad_middle_pack_keeps_blocks_before_it(
        self, run: Run, url: str
    ) -> None:
        context = MiddlePack(url)
        with Damage(url, context.namespace) as damage:
            damage.flip_payload(context.pack, 5000)
        context.check_repair(run)

    def test_repair_prints_plan_before_result(self, run: Run, url: str) -> None:
        context = MiddlePack(url)
        with Damage(url, context.namespace) as damage:
            damage.flip_payload(context.pack, 5000)
        done = run("verify", url, "--repair", "--yes")
        plan, _, result = done.stdout.partition("deleted 1 pack")
        assert result
        rows = {
            line.split()[0]: line.split() for line in plan.splitlines() if line.split()
        }
        assert rows[context.pack.hex()[:8]][1:3] == [context.namespace.hex()[:8], "2"]
        assert rows["whole"][1:] == ["6", "2"], "blocks before and after"
        assert rows["lost"][1:] == ["2", "0"]
        assert "begin" not in rows
        assert (
            "to delete: 1 pack, 2 blocks, 16.0 KiB, and 1 request; to shorten: 1 request"
            in plan
        )

    def test_repair_json_contains_plan(self, run: Run, url: str) -> None:
        context = MiddlePack(url)
        with Damage(url, context.namespace) as damage:
            damage.flip_payload(context.pack, 5000)
        assert json.loads(run("verify", url, "--json").stdout)["repair"] is None
        plan = json.loads(run("verify", url, "--repair", "--yes", "--json").stdout)[
            "repair"
        ]
        assert (plan["blocks"], plan["stored_bytes"]) == (2, 16384)
        assert [
            (row["namespace"], row["pack"], row["blocks"]) for row in plan["packs"]
        ] == [(context.namespace.hex(), context.pack.hex(), 2)]
        found = [
            (row["request"], row["blocks"], row["kept_blocks"])
            for row in plan["requests"]
        ]
        assert sorted(found) == [("lost", 2, 0), ("whole", 6, 2)]

    def test_repair_prints_shortened_and_deleted_requests(
        self, run: Run, url: str
    ) -> None:
        store_with_a_bad_pack(url)
        shown = run("verify", url, "--repair", "--yes").stdout
        assert "deleted 1 pack" in shown
        assert (
            "requests: 0 shortened to the blocks before the bad packs, 1 deleted, because no "
            "block was left" in shown
        )

    @pytest.mark.parametrize(
        "options",
        [
            ("--sample", "0"),
            ("--sample", "1.5"),
            ("--sample", "5%"),
            ("--rate", "fast"),
        ],
    )
    def test_bad_option_exits_2(
        self, run: Run, filled: str, options: tuple[str, str]
    ) -> None:
        done = run("verify", filled, *options)
        assert done.returncode == 2
        assert options[0] in done.stderr
        assert "is not valid; expected" in done.stderr

    def test_repair_absent_store_exits_3_and_creates_nothing(
        self, run: Run, tmp_path: Path
    ) -> None:
        assert (
            run("verify", f"lmdb://{tmp_path}/absent", "--repair", "--yes").returncode
            == 3
        )
        assert not (tmp_path / "absent").exists()
