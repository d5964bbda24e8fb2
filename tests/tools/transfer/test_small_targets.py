"""Push, pull and import into stores whose capacity is too small for everything."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv_tools.options import Selection
from persistkv_tools.transfer.push import Room, capacity_for
from tests.tools.contexts import Contexts
from tests.tools.transfers import ignore, push

BLOCK = 64 << 10
WORDS = 16  # blocks per request: 1 MiB


class TestSmallTargets:
    """Source of 24 requests of 1 MiB each, of which r00 is the newest, and smaller targets."""

    @pytest.fixture
    def source(self, tmp_path):
        url = f"lmdb://{tmp_path}/source?capacity=64MiB"
        with closing(open_backend(url)) as backend:
            writer = Contexts(backend, block_bytes=BLOCK)
            for number in range(24):
                words = " ".join(f"{number}-{word}" for word in range(WORDS))
                writer.add(f"r{number:02d}", words, age_s=100.0 + number)
        return url

    def target(self, tmp_path, capacity, count=0):
        """Return the URL of a target that already holds ``count`` requests of another identity."""
        url = f"lmdb://{tmp_path}/target?capacity={capacity}"
        if count:
            with closing(open_backend(url)) as backend:
                writer = Contexts(
                    backend, Identity.of({"weights": "theirs"}), block_bytes=BLOCK
                )
                for number in range(count):
                    words = " ".join(f"old {number}-{word}" for word in range(WORDS))
                    writer.add(f"old{number:02d}", words, age_s=9_000.0 + number)
        return url

    def commands(self, run, source, target):
        """Return each command that copies everything from the source to the target."""
        assert (
            run("export", source, "--all", "-o", "all.pkv", "--force").returncode == 0
        )
        return [
            ("push", source, target),
            ("pull", target, source),
            ("import", "all.pkv", target),
        ]

    def held(self, run, url):
        return {
            row["id"] for row in json.loads(run("ls", url, "--json").stdout)["requests"]
        }

    def test_new_target_too_small_is_refused_and_not_created(
        self, run, source, tmp_path
    ):
        target = self.target(tmp_path, "8MiB")
        for command in self.commands(run, source, target):
            done = run(*command)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
                2,
                "",
                1,
            ), command
            assert "24 requests" in done.stderr
            assert "24.6 MiB" in done.stderr  # including catalogue rows
            assert "8.0 MiB" in done.stderr
            assert "larger capacity" in done.stderr
            assert "--newest" in done.stderr
            assert not (tmp_path / "target").exists()

    def test_target_too_small_is_refused_and_keeps_its_content(
        self, run, source, tmp_path
    ):
        target = self.target(tmp_path, "32MiB", 8)
        before = self.held(run, target)
        assert len(before) == 8
        for command in self.commands(run, source, target):
            done = run(*command)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
                2,
                "",
                1,
            ), command
            assert self.held(run, target) == before

    @pytest.mark.parametrize("count", [0, 8])
    def test_newest_option_copies_fitting_requests_and_lists_missing(
        self, run, source, tmp_path, count
    ):
        target = self.target(tmp_path, "24MiB", count)
        for command in self.commands(run, source, target):
            if count:
                before = self.held(run, target) & {
                    f"old{number:02d}" for number in range(count)
                }
                assert len(before) == count
            done = run(*command, "--newest", "--json")
            assert done.returncode == 1, done.stderr
            received = json.loads(done.stdout)["received"]
            missing = received["missing"]
            assert 1 <= 24 - len(missing) <= 24 - count
            assert missing == [
                f"r{number:02d}" for number in range(24 - len(missing), 24)
            ], "the oldest are missing"
            assert (
                received["evicted_packs"],
                received["lost"],
                received["lost_packs"],
            ) == (0, [], 0)
            old = {f"old{number:02d}" for number in range(count)}
            assert self.held(run, target) == old | {
                f"r{number:02d}" for number in range(24 - len(missing))
            }
            assert received["requests"] + received["requests_held"] == 24 - len(missing)
        shown = run("push", source, target, "--newest")
        assert shown.returncode == 1
        assert f"no room for {len(missing)} requests" in shown.stdout
        assert f"  {missing[0]}\n" in shown.stdout
        assert run("verify", target).returncode == 0

    @pytest.mark.parametrize("shared", ["", "shared "])
    @pytest.mark.parametrize("capacity", ["1MiB", "1.5MiB", "2MiB", "2.5MiB"])
    def test_newest_option_tiny_target_evicts_nothing(
        self, run, tmp_path, capacity, shared
    ):
        """The catalogue takes 1 MiB of a store that is smaller than 32 MiB."""
        url = f"lmdb://{tmp_path}/few?capacity=64MiB"
        with closing(open_backend(url)) as backend:
            writer = Contexts(backend, block_bytes=BLOCK)
            for number in range(12):
                writer.add(
                    f"r{number:02d}",
                    f"{shared}a{number} b{number} c{number}",
                    age_s=100.0 + number,
                )
        target = self.target(tmp_path, capacity)
        planned = json.loads(
            run("push", url, target, "--newest", "--dry-run", "--json").stdout
        )["received"]
        assert (
            json.loads(run("push", url, target, "--newest", "--json").stdout)[
                "received"
            ]
            == planned
        )
        for command in self.commands(run, url, target):
            done = run(*command, "--newest", "--json")
            assert done.returncode == 1, done.stderr
            received = json.loads(done.stdout)["received"]
            fitting = 12 - len(received["missing"])
            assert received["missing"] == [
                f"r{number:02d}" for number in range(fitting, 12)
            ]
            assert (received["evicted_packs"], received["lost"]) == (0, [])
            assert fitting >= {"1MiB": 0, "1.5MiB": 1, "2MiB": 3, "2.5MiB": 5}[capacity]

    def test_push_content_held_by_target_needs_no_room(self, run, source, tmp_path):
        target = self.target(tmp_path, "64MiB")
        assert run("push", source, target).returncode == 0
        again = json.loads(run("push", source, target, "--json").stdout)["received"]
        assert (again["requests_held"], again["packs"]) == (24, 0)
        small = self.target(tmp_path / "small", "24MiB")
        assert run("push", source, small, "--newest").returncode == 1
        held = json.loads(run("ls", small, "--json").stdout)["requests"]
        with closing(open_backend(source)) as backend:
            writer = Contexts(backend, block_bytes=BLOCK)
            names = [
                name
                for name in self.held(run, source)
                if name not in {row["id"] for row in held}
            ]
            packs = [
                table.pack_id for table in backend.changes(writer.namespace, None).added
            ]
            gone = {
                pack
                for name in names
                for pack in self.packs_of(backend, writer.namespace, name)
            }
            backend.commit(
                writer.namespace,
                CommitBatch(deletions=[pack for pack in packs if pack in gone]),
            )
        assert run("push", source, small).returncode == 0, (
            "nothing is left to copy into a store that is full"
        )

    def packs_of(self, backend, namespace, name):
        return backend.catalogue(namespace).chain(name)

    @pytest.mark.parametrize(
        ("capacity", "expected"), [("12GiB", 12 << 30), ("64MiB", 10 << 30)]
    )
    def test_push_new_target_gets_source_capacity_if_above_default(
        self, run, tmp_path, capacity, expected
    ):
        source = f"lmdb://{tmp_path}/source?capacity={capacity}"
        with closing(open_backend(source)) as backend:
            Contexts(backend).add("one", "a b")
        found = json.loads(
            run("push", source, f"lmdb://{tmp_path}/target", "--json").stdout
        )
        assert found["capacity"] == expected
        assert (
            json.loads(run("stat", f"lmdb://{tmp_path}/target", "--json").stdout)[
                "capacity"
            ]
            == expected
        )
        chosen = json.loads(
            run(
                "push", source, f"lmdb://{tmp_path}/other?capacity=32MiB", "--json"
            ).stdout
        )
        assert chosen["capacity"] == 32 << 20
        said = run("push", source, f"lmdb://{tmp_path}/third").stdout
        assert ("was created with a capacity of 12.0 GiB" in said) == (
            capacity == "12GiB"
        )

    @pytest.mark.parametrize("share", [1.02, 1.1, 1.3])
    @pytest.mark.parametrize("placement", ["extents", "inline"])
    def test_push_interrupted_into_barely_large_target_resumes(
        self, run, source, tmp_path, share, placement
    ):
        """A target of the smallest accepted capacity, or a larger one, also accepts the rest of an
        interrupted copy."""
        smallest = next(
            size
            for size in range(24, 64)
            if run(
                "push",
                source,
                f"lmdb://{tmp_path}/probe{size}?capacity={size}MiB&placement={placement}",
            ).returncode
            == 0
        )
        target = f"lmdb://{tmp_path}/cut?capacity={int(share * smallest)}MiB&placement={placement}"
        with (
            closing(open_backend(source, read_only=True)) as backend,
            closing(open_backend(target)) as cut,
        ):
            stop = 0

            def took(num_bytes):
                nonlocal stop
                stop += num_bytes
                if stop > 12 << 20:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                push(backend, cut, backend.namespaces(), Selection(), took)
        done = run("push", source, target, "--json")
        assert done.returncode == 0, done.stderr
        received = json.loads(done.stdout)["received"]
        assert (received["evicted_packs"], received["missing"], received["lost"]) == (
            0,
            [],
            [],
        )
        assert 0 < received["requests"] < 24
        assert len(self.held(run, target)) == 24

    def test_capacity_for_any_content_size_leaves_enough_room(self):
        """The capacity of a store that ``import`` creates is enough for content of any size."""
        for size in (0, 1 << 20, 100 << 20, 3 << 30, 700 << 30, 9 << 40):
            assert Room(capacity_for(size)).free_bytes >= size

    def test_push_target_without_capacity_accepts_all_requests(
        self, source, memory_store
    ):
        target = memory_store()
        with closing(open_backend(source, read_only=True)) as backend:
            received = push(backend, target, backend.namespaces(), Selection(), ignore)
        assert (received.requests, received.complete) == (24, True)
