"""Copies into stores whose capacity is too small for everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from persistkv.testing import MemoryBackend
from persistkv_tools.transfer.room import TargetRoom, capacity_for
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.transfers import copy

BLOCK = 64 << 10
WORDS = 16  # blocks per request: 1 MiB


class TestSmallTargets:
    """Source of 24 requests of 1 MiB each, of which r00 is the newest, and smaller targets."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> str:
        url = f"lmdb://{tmp_path}/source?capacity=64MiB"
        with closing(open_backend(url)) as backend:
            writer = Contexts(backend, block_bytes=BLOCK)
            for number in range(24):
                words = " ".join(f"{number}-{word}" for word in range(WORDS))
                writer.add(f"r{number:02d}", words, age_s=100.0 + number)
        return url

    def target(self, tmp_path: Path, capacity: str, count: int = 0) -> str:
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

    def held(self, run: Run, url: str) -> set[str]:
        return {
            row["id"] for row in json.loads(run("ls", url, "--json").stdout)["requests"]
        }

    def test_new_target_too_small_is_refused_and_not_created(
        self,
        run: Run,
        source: str,
        tmp_path: Path,
    ) -> None:
        done = run("copy", source, self.target(tmp_path, "8MiB"))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "24 requests" in done.stderr
        assert "24.6 MiB" in done.stderr  # including catalogue rows
        assert "8.0 MiB" in done.stderr
        assert "larger capacity" in done.stderr
        assert "--newest" in done.stderr
        assert not (tmp_path / "target").exists()

    def test_target_too_small_is_refused_and_keeps_its_content(
        self,
        run: Run,
        source: str,
        tmp_path: Path,
    ) -> None:
        target = self.target(tmp_path, "32MiB", 8)
        before = self.held(run, target)
        assert len(before) == 8
        done = run("copy", source, target)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert self.held(run, target) == before

    def proposed(self, run: Run, source: str, target: str) -> int:
        """Return the number of newest requests that the refusal of a copy proposes; 0: none."""
        done = run("copy", source, target)
        assert done.returncode == 2
        number = done.stderr.partition("--newest ")[2]
        return int(number or 0)

    @pytest.mark.parametrize("count", [0, 8])
    def test_proposed_number_of_newest_requests_fits_and_evicts_nothing(
        self,
        run: Run,
        source: str,
        tmp_path: Path,
        count: int,
    ) -> None:
        target = self.target(tmp_path, "24MiB", count)
        number = self.proposed(run, source, target)
        assert 1 <= number <= 24 - count
        done = run("copy", source, target, "--newest", str(number), "--json")
        assert done.returncode == 0, done.stderr
        copied = json.loads(done.stdout)["copied"]
        assert (copied["evicted_packs"], copied["lost"], copied["lost_packs"]) == (
            0,
            [],
            0,
        )
        assert copied["requests"] == number
        old = {f"old{each:02d}" for each in range(count)}
        newest = {f"r{each:02d}" for each in range(number)}
        assert self.held(run, target) == old | newest
        assert run("verify", target).returncode == 0

    @pytest.mark.parametrize("shared", ["", "shared "])
    @pytest.mark.parametrize("capacity", ["1MiB", "1.5MiB", "2MiB", "2.5MiB"])
    def test_proposed_number_fits_into_tiny_target(
        self,
        run: Run,
        tmp_path: Path,
        capacity: str,
        shared: str,
    ) -> None:
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
        number = self.proposed(run, url, target)
        assert number >= {"1MiB": 0, "1.5MiB": 1, "2MiB": 3, "2.5MiB": 5}[capacity]
        if number:
            chosen = ("copy", url, target, "--newest", str(number), "--json")
            planned = json.loads(run(*chosen, "--dry-run").stdout)["copied"]
            copied = json.loads(run(*chosen).stdout)["copied"]
            assert copied == planned
            assert (copied["requests"], copied["evicted_packs"]) == (number, 0)

    def test_copy_content_held_by_target_needs_no_room(
        self, run: Run, source: str, tmp_path: Path
    ) -> None:
        target = self.target(tmp_path, "64MiB")
        assert run("copy", source, target).returncode == 0
        again = json.loads(run("copy", source, target, "--json").stdout)["copied"]
        assert (again["requests_held"], again["packs"]) == (24, 0)
        small = self.target(tmp_path / "small", "24MiB")
        number = str(self.proposed(run, source, small))
        assert run("copy", source, small, "--newest", number).returncode == 0
        assert run("copy", source, small, "--newest", number).returncode == 0, (
            "nothing is left to copy into a store that is full"
        )

    @pytest.mark.parametrize(
        ("capacity", "expected"), [("12GiB", 12 << 30), ("64MiB", 10 << 30)]
    )
    def test_copy_new_target_gets_source_capacity_if_above_default(
        self,
        run: Run,
        tmp_path: Path,
        capacity: str,
        expected: int,
    ) -> None:
        source = f"lmdb://{tmp_path}/source?capacity={capacity}"
        with closing(open_backend(source)) as backend:
            Contexts(backend).add("one", "a b")
        found = json.loads(
            run("copy", source, f"lmdb://{tmp_path}/target", "--json").stdout
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
                "copy", source, f"lmdb://{tmp_path}/other?capacity=32MiB", "--json"
            ).stdout
        )
        assert chosen["capacity"] == 32 << 20
        said = run("copy", source, f"lmdb://{tmp_path}/third").stdout
        assert ("was created with a capacity of 12.0 GiB" in said) == (
            capacity == "12GiB"
        )

    @pytest.mark.parametrize("share", [1.02, 1.1, 1.3])
    @pytest.mark.parametrize("placement", ["extents", "inline"])
    def test_copy_interrupted_into_barely_large_target_resumes(
        self,
        run: Run,
        source: str,
        tmp_path: Path,
        share: float,
        placement: str,
    ) -> None:
        """A target of the smallest accepted capacity, or a larger one, also accepts the rest of an
        interrupted copy."""
        smallest = next(
            size
            for size in range(24, 64)
            if run(
                "copy",
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

            def on_bytes(num_bytes: int) -> None:
                nonlocal stop
                stop += num_bytes
                if stop > 12 << 20:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                copy(backend, cut, on_bytes=on_bytes)
        done = run("copy", source, target, "--json")
        assert done.returncode == 0, done.stderr
        copied = json.loads(done.stdout)["copied"]
        assert (copied["evicted_packs"], copied["lost"]) == (0, [])
        assert 0 < copied["requests"] < 24
        assert len(self.held(run, target)) == 24

    def test_capacity_for_any_content_size_leaves_enough_room(self) -> None:
        """The capacity of a store that ``copy`` creates is enough for content of any size."""
        for size in (0, 1 << 20, 100 << 20, 3 << 30, 700 << 30, 9 << 40):
            assert TargetRoom(capacity_for(size)).free_bytes >= size

    def test_copy_target_without_capacity_accepts_all_requests(
        self,
        source: str,
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        target = memory_store()
        with closing(open_backend(source, read_only=True)) as backend:
            copied = copy(backend, target)
        assert (copied.requests, copied.complete) == (24, True)
