"""100 errors of ten kinds in an LMDB store of 150 packs: ``verify`` finds each of them and reports
nothing else."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

from persistkv.storage import open_backend
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.damage import Damage

EACH = 10
BLOCK_BYTES = 5000  # frames end within a page, so that there is padding to damage


def test_verify_damaged_inline_store_reports_all_errors_and_no_others(
    run: Run, url: str
) -> None:
    rng = random.Random(7)
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, block_bytes=BLOCK_BYTES)
        # without requests, so that a missing table is one problem instead of two
        for number in range(100):
            writer.add(f"p{number}", f"p{number} x y", manifest=False)
        for number in range(50):
            writer.add(f"r{number}", f"r{number} x y")
    packs = [writer.packs[f"p{number}"] for number in range(100)]
    bad: dict[str, set[str | None]] = {}
    with Damage(url, writer.namespace) as damage:
        first, second, third, fourth, fifth, sixth, seventh = (
            packs[start : start + EACH] for start in range(0, 70, EACH)
        )
        for pack in first:
            damage.flip_payload(pack, rng.randrange(3 * BLOCK_BYTES))
        for pack in second:
            damage.flip_payload(pack, rng.randrange(3 * BLOCK_BYTES, 16_384))
        for one, other in zip(third[::2], third[1::2], strict=True):
            damage.swap_payloads(one, other)
        for pack in fourth:
            damage.cut_payload(pack, rng.randrange(16_384))
        for pack in fifth:
            damage.drop_payload(pack)
        for pack in sixth:
            damage.change_key(pack)
        for pack in seventh:
            damage.flip_table(pack, rng.randrange(200))
        for pack in packs[70:80]:
            damage.misplace_table(pack, packs[99])
        for number in range(EACH):
            damage.flip_head(f"r{number}", rng.randrange(30))
            damage.flip_keys(f"r{EACH + number}", rng.randrange(100))
        bad["payload"] = {pack.hex() for pack in [*first, *third]}
        bad["padding"] = {pack.hex() for pack in second}
        bad["short"] = {pack.hex() for pack in [*fourth, *fifth]}
        bad["name"] = {pack.hex() for pack in sixth}
    done = run("verify", url, "--json")
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    found: dict[str, set[str | None]] = {}
    for finding in summary["findings"]:
        found.setdefault(finding["problem"], set()).add(
            finding["pack"] or finding["request"]
        )
    # the seed of a frame's checksum depends on its keys
    assert bad["name"] <= found["payload"]
    assert found.pop("payload") == bad.pop("payload") | bad["name"]
    assert found.pop("manifest keys") == {f"r{EACH + number}" for number in range(EACH)}
    assert found == bad | {"pack rows": {None}, "manifest rows": {None}}
    assert summary["by_problem"] == {
        "payload": 30,
        "padding": 10,
        "short": 20,
        "name": 10,
        "pack rows": 20,
        "manifest rows": 10,
        "manifest keys": 10,
    }


def test_verify_damaged_segments_reports_all_errors_and_no_others(
    run: Run, tmp_path: Path
) -> None:
    """Payloads in extents, 100 errors of five kinds in 160 packs: ``verify`` finds each and reports
    nothing else."""
    rng = random.Random(11)
    url = f"lmdb://{tmp_path}/segments?capacity=64MiB&placement=extents"
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, block_bytes=BLOCK_BYTES)
        for number in range(160):
            writer.add(f"p{number}", f"p{number} x y", manifest=False)
    with Damage(url, writer.namespace) as damage:
        places = {pack: damage.extent(pack) for pack in writer.packs.values()}
        assert len({place.file for place in places.values()}) == 1
        packs = sorted(places, key=lambda pack: places[pack].offset)
        cut, rest = packs[-20:], packs[:-20]
        rng.shuffle(rest)
        flipped, swapped, wrong, stale = (
            rest[start : start + 20] for start in range(0, 80, 20)
        )
        for pack in flipped:
            places[pack].flip(rng.randrange(3 * BLOCK_BYTES))
        for one, other in zip(swapped[::2], swapped[1::2], strict=True):
            theirs = places[other].read()
            places[other].write(places[one].read())
            places[one].write(theirs)
        for pack in wrong:
            damage.change_key(pack)
        for pack in stale:
            damage.stale_extent(pack, rest[-1])
        file = places[cut[0]].file
        with file.open("r+b") as segment:
            segment.truncate(places[cut[0]].offset)
    done = run("verify", url, "--json")
    assert done.returncode == 1, done.stderr
    found: dict[str, set[str | None]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["problem"], set()).add(finding["pack"])
    assert found == {
        "payload": {pack.hex() for pack in [*flipped, *swapped, *wrong, *stale]},
        "name": {pack.hex() for pack in wrong},
        "short": {pack.hex() for pack in cut},
    }


def test_verify_repair_deletes_bad_packs_and_shortens_requests(
    run: Run, url: str
) -> None:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, block_bytes=BLOCK_BYTES)
        for number in range(20):
            writer.add(f"r{number}", f"shared r{number} x")
    with Damage(url, writer.namespace) as damage:
        for number in (3, 4, 5):
            damage.flip_payload(writer.packs[f"r{number}"], 100 * number)
    assert run("verify", url, "--repair", "--yes").returncode == 1
    assert run("verify", url).returncode == 0
    left = json.loads(run("ls", url, "--json").stdout)["requests"]
    # to the prefix that they share with the first request
    shortened = {"r3", "r4", "r5"}
    assert {request["id"]: request["blocks"] for request in left} == {
        name: 1 if name in shortened else 3
        for name in (f"r{number}" for number in range(20))
    }
