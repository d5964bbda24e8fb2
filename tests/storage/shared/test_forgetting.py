"""Forgetting of a tenant in shared stores: what can be found, read and stored afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError, StoreError, TenantForgottenError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blobs import BlobMissingError, UnavailableError
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.shared.format import Delta, encode, seal_object
from persistkv.storage.shared.replica import Limits
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing.blobs import METHODS
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest
from tests.storage.shared.disclosure import Reader, Version
from tests.storage.shared.town import NAMES, NAMESPACE, Engine, Town, town_of

SECRET = "0123456789abcdef" * 4
KEY = "PERSISTKV_TEST_KEY"


@pytest.fixture(params=["key", "plain"])
def has_key(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "key")


@pytest.fixture
def town(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_key: bool,
) -> Iterator[Town]:
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.setenv("PERSISTKV_OTHER_KEY", SECRET[::-1])
    with town_of(tmp_path) as town:
        town.key_env = KEY if has_key else None
        yield town


only_with_key = pytest.mark.parametrize("has_key", ["key"], indirect=True)


def store_one(engine: Engine, tenant: str, seed: int) -> set[bytes]:
    """Store a pack and a request of a tenant; return plaintexts in them."""
    pack = engine.pack(seed, tenant=tenant)
    name = f"planted-by-{tenant}-{seed}"
    request = sample_manifest(
        name, seed, labels={"user": name}, packs=[pack.pack_id], tenant=tenant
    )
    engine.backend.commit(NAMESPACE, CommitBatch([pack], [request]))
    engine.due_at = engine.clock.monotonic()
    payload = payload_of(pack)
    planted = {payload[4096 * block : 4096 * block + 24] for block in range(4)}
    return {*planted, *pack.keys.unpack(), name.encode()}


def forget(town: Town, tenant: str = "anna") -> Forgotten:
    """Forget a tenant as the command does, with a handle of its own."""
    operator = town.engine(opens=False)
    try:
        return operator.backend.forget(tenant)
    finally:
        town.stop(operator)


def content_of(engine: Engine, tenant: str) -> tuple[int, list[str]]:
    """Return the number of the packs and the requests of a tenant, after reading all packs."""
    engine.backend.refresh()
    packs = 0
    for table in tables(engine.backend, NAMESPACE).values():
        assert read_pack(engine.backend, NAMESPACE, table) is not None
        packs += table.tenant == tenant
    heads = engine.backend.catalogue(NAMESPACE).manifests()
    return packs, [head.id for head in heads if head.tenant == tenant]


def disclosed(town: Town, planted: set[bytes]) -> int:
    """Return how many plaintexts somebody reads who has the user's key and all blobs."""
    versions = [Version(name, town.data(name)) for name in town.names("")]
    requests: list[str] = []
    for tenant, seed in itertools.product(("anna", "berta"), range(10)):
        requests.append(f"planted-by-{tenant}-{seed}")
    reader = Reader(StoreKey(SECRET.encode()), versions, NAMESPACE, requests)
    return reader.found(versions, planted)


def fresh_content(town: Town, tenant: str) -> tuple[int, list[str]]:
    """Return the content that a new handle with an empty replica shows."""
    engine = town.engine()
    try:
        return content_of(engine, tenant)
    finally:
        town.stop(engine)


def found_in_blobs(town: Town, planted: set[bytes]) -> int:
    """Return how many of these byte strings any blob has."""
    found: set[bytes] = set()
    for name in town.names(""):
        data = town.data(name)
        found.update(text for text in planted - found if text in data)
    return len(found)


def test_forget_removes_tenant_and_keeps_others(town: Town, has_key: bool) -> None:
    first, second = town.engine(), town.engine()
    planted: set[bytes] = set()
    for seed, engine in enumerate((first, second, first)):
        planted |= store_one(engine, "anna", seed)
        store_one(engine, "berta", 100 + seed)
    town.run(30)
    planted |= store_one(first, "anna", 7)
    done = forget(town)
    assert (done.tenant, done.packs, done.requests) == ("anna", 4, 4)
    assert len(done.key_ids) == has_key
    assert done.stored_bytes == 4 * 4 * 4096
    assert found_in_blobs(town, planted) == 0
    for engine in (first, second):
        assert content_of(engine, "anna") == (0, [])
        assert content_of(engine, "berta")[0] == 3
    assert fresh_content(town, "anna") == (0, [])
    assert len(fresh_content(town, "berta")[1]) == 3


def test_forget_is_repeatable_and_absent_tenant_has_nothing(town: Town) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    store_one(engine, "berta", 2)
    assert forget(town).packs == 1
    for tenant in ("anna", "nobody"):
        again = forget(town, tenant)
        assert (again.packs, again.requests, again.key_ids) == (0, 0, ())
    assert content_of(engine, "berta")[0] == 1


def test_forget_default_tenant_keeps_others(town: Town) -> None:
    engine = town.engine()
    store_one(engine, DEFAULT_TENANT, 1)
    store_one(engine, "berta", 2)
    town.run(30)
    done = forget(town, DEFAULT_TENANT)
    assert (done.packs, done.requests) == (1, 1)
    assert content_of(engine, DEFAULT_TENANT) == (0, [])
    assert fresh_content(town, DEFAULT_TENANT) == (0, [])
    assert fresh_content(town, "berta")[0] == 1


def test_forget_invalid_name_raises(town: Town) -> None:
    engine = town.engine()
    with pytest.raises(ConfigurationError, match="tenant"):
        engine.backend.forget("")


def shown_tenants(engine: Engine) -> set[str]:
    """Return the tenants of the packs and requests that an engine shows at this moment."""
    packs = {table.tenant for table in tables(engine.backend, NAMESPACE).values()}
    heads = engine.backend.catalogue(NAMESPACE).manifests()
    return packs | {head.tenant for head in heads}


@pytest.mark.parametrize("times", [1, 2])
def test_record_that_another_replaces_before_it_is_read_is_honoured_at_once(
    town: Town,
    times: int,
) -> None:
    """Each `forget` writes a blob with all records, and deletes the one before."""
    engine = town.engine()
    for seed, tenant in enumerate(("anna", "berta", "carla", "dora")):
        store_one(engine, tenant, seed)
    town.run(30)
    forget(town)
    others = ["berta", "carla"][:times]
    left = [*others]

    def replace(name: str) -> None:
        if "/forgotten/" in name and left:
            forget(town, left.pop())

    engine.blobs.before("read", replace)
    engine.backend.refresh()
    assert not left
    assert shown_tenants(engine) == {"berta", "carla", "dora"} - {*others}


@only_with_key
def test_record_that_stays_listed_and_missing_is_read_later(town: Town) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    store_one(engine, "berta", 2)
    town.run(30)
    forget(town)
    error = BlobMissingError("it is listed, and does not exist")
    engine.blobs.fail("read", error, only=lambda name: "/forgotten/" in name)
    engine.backend.refresh()
    assert engine.calls("read", "/forgotten/") == 2
    assert shown_tenants(engine) == {"anna", "berta"}
    store_one(engine, "berta", 3)
    engine.blobs.clear_faults()
    # all records are read once an hour
    town.run(3700)
    assert shown_tenants(engine) == {"berta"}


@pytest.mark.parametrize("has_key", ["plain"], indirect=True)
def test_records_that_are_replaced_all_the_time_count_as_unread(town: Town) -> None:
    """Without a key, the forgetting of a tenant without content writes a record, too."""
    engine = town.engine()
    store_one(engine, "anna", 1)
    town.run(30)
    late = town.engine(opens=False)
    forget(town)

    def replace(name: str) -> None:
        if "/forgotten/" in name:
            forget(town, f"tenant {len(late.blobs.calls)}")

    late.blobs.before("read", replace)
    with pytest.raises(UnavailableError, match="being replaced"):
        late.backend.refresh()
    late.blobs.clear_faults()
    late.backend.refresh()
    assert late.open() == NAMESPACE
    assert shown_tenants(late) == set()


@only_with_key
def test_engine_drops_what_it_has_accepted_and_stores_later_content(
    town: Town,
) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    (first,) = tables(engine.backend, NAMESPACE).values()
    done = forget(town)
    assert done.key_ids == (first.data_key.hex(),)
    town.run(70)
    with pytest.raises(TenantForgottenError) as caught:
        store_one(engine, "anna", 2)
    assert caught.value.tenants == {"anna"}
    store_one(engine, "anna", 3)
    (second,) = tables(engine.backend, NAMESPACE).values()
    assert second.data_key != first.data_key
    town.run(70)
    assert content_of(engine, "anna") == (1, ["planted-by-anna-3"])
    assert fresh_content(town, "anna") == (1, ["planted-by-anna-3"])
    assert forget(town).key_ids == (second.data_key.hex(),)


@only_with_key
def test_request_with_id_of_before_is_stored_again_everywhere(town: Town) -> None:
    """Engines that have not learned it know later versions of the request."""
    unaware = town.engine()
    for _ in range(3):
        store_one(unaware, "anna", 1)
    forget(town)
    engine = town.engine()
    store_one(engine, "anna", 1)
    unaware.backend.opened_namespace(NAMESPACE).reader.refresh(inbox_age_s=0.0)
    town.run(200)
    for other in (unaware, engine):
        assert content_of(other, "anna") == (1, ["planted-by-anna-1"])
    assert fresh_content(town, "anna") == (1, ["planted-by-anna-1"])


@only_with_key
def test_late_commit_under_destroyed_key_is_never_shown_and_others_are_merged(
    town: Town,
) -> None:
    """An engine is paused for an hour, and does not learn it before it commits and merges."""
    late, other = town.engine(), town.engine()
    planted = store_one(late, "anna", 1)
    town.run(30)
    town.kill(late)
    forget(town)
    town.run(3600)
    planted |= store_one(late, "anna", 2)
    store_one(late, "berta", 3)
    late.backend.opened_namespace(NAMESPACE).merger.merge(Limits())
    town.run(3600)
    assert not town.names("/inbox/")
    assert fresh_content(town, "anna") == (0, [])
    assert content_of(other, "anna") == (0, [])
    assert content_of(other, "berta")[0] == 1
    assert disclosed(town, planted) == 0
    town.engines.append(late)
    late.due_at = town.now
    town.run(70)
    assert content_of(late, "anna") == (0, [])


@only_with_key
def test_key_blob_that_comes_back_stays_unused_and_is_swept(town: Town) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    (table,) = tables(engine.backend, NAMESPACE).values()
    (name,) = [n for n in town.names("/tenants/") if table.data_key.hex() in n]
    record = town.data(name)
    forget(town)
    town.server.put(name, [record])
    assert fresh_content(town, "anna") == (0, [])
    store_one(town.engine(), "anna", 2)
    assert fresh_content(town, "anna") == (1, ["planted-by-anna-2"])
    town.run(3 * 86_400)
    assert name not in town.names("/tenants/")


def test_restored_machine_honours_the_record_before_it_shows_anything(
    town: Town,
) -> None:
    """Its replica and saved index are those of before."""
    engine = town.engine(cache="machine")
    store_one(engine, "anna", 1)
    store_one(engine, "berta", 2)
    town.run(30)
    town.stop(engine)
    forget(town)
    again = town.engine(cache="machine")
    shown = {table.tenant for table in tables(again.backend, NAMESPACE).values()}
    assert shown == {"berta"}
    assert content_of(again, "anna") == (0, [])


@only_with_key
def test_rebuild_does_not_name_packs_of_forgotten_tenant(town: Town) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    store_one(engine, "berta", 2)
    packs = {name: town.data(name) for name in town.names("/packs/")}
    forget(town)
    town.run(70)
    town.server.delete([*town.names("/inbox/"), *town.names("/index/")])
    for name, data in packs.items():
        town.server.put(name, [data])
    operator = town.engine(opens=False)
    found = operator.backend.rebuild_index(lambda done, of: None)
    assert found is not None
    assert found.packs == 1
    assert fresh_content(town, "anna") == (0, [])
    assert fresh_content(town, "berta")[0] == 1


@only_with_key
def test_base_of_an_engine_that_has_not_learned_it_keeps_later_content(
    town: Town,
) -> None:
    """It seals what each data key has sealed with the same key again."""
    unaware = town.engine()
    planted = store_one(unaware, "anna", 1)
    assert disclosed(town, planted) == len(planted)
    forget(town)
    other = town.engine()
    store_one(other, "anna", 2)
    store_one(other, "berta", 3)
    namespace = unaware.backend.opened_namespace(NAMESPACE)
    namespace.reader.refresh(inbox_age_s=0.0)
    namespace.merger.merge(Limits())
    namespace.merger.write_base(1)
    town.server.delete(
        [name for name in town.names("/index/") if "/00010001-" not in name]
    )
    assert fresh_content(town, "anna") == (1, ["planted-by-anna-2"])
    assert fresh_content(town, "berta")[0] == 1
    assert disclosed(town, planted) == 0


@only_with_key
def test_second_key_of_the_same_moment_is_destroyed_too(town: Town) -> None:
    """Another engine makes it between the list of the keys and the record."""
    engine = town.engine()
    store_one(engine, "anna", 1)
    (known,) = tables(engine.backend, NAMESPACE).values()
    operator = town.engine(opens=False)
    late = town.engine()

    def make_another(name: str) -> None:
        if "/forgotten/" not in name:
            return
        operator.blobs.clear_faults()
        names = town.names("/tenants/")
        kept = {name: town.data(name) for name in names}
        town.server.delete(names)
        late.backend.keys.drop([known.data_key])
        store_one(late, "anna", 2)
        for name, data in kept.items():
            town.server.put(name, [data])

    operator.blobs.before("put", make_another)
    assert len(operator.backend.forget("anna").key_ids) == 2
    assert not town.names("/tenants/")
    assert fresh_content(town, "anna") == (0, [])


def test_forget_killed_at_each_call_is_completed_by_the_next_one(
    tmp_path: Path,
    has_key: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    for calls in itertools.count():
        with town_of(tmp_path / str(calls)) as town:
            town.key_env = KEY if has_key else None
            engine = town.engine()
            planted = store_one(engine, "anna", 1)
            store_one(engine, "berta", 2)
            town.run(30)
            planted |= store_one(engine, "anna", 3)
            operator = town.engine(opens=False)
            has_ended = killed_after(operator, calls)
            done = forget(town)
            assert found_in_blobs(town, planted) == 0
            assert content_of(engine, "anna") == (0, [])
            assert content_of(engine, "berta")[0] == 1
            assert len(town.names("/tenants/")) == has_key
            assert len(town.names("/packs/")) == 1
            if has_ended:
                assert (done.packs, done.key_ids) == (0, ())
                break
    assert calls > 10


def killed_after(operator: Engine, calls: int) -> bool:
    """Let an operator forget a tenant until all calls fail after some; return whether it ended."""
    left = itertools.count(calls, -1)

    def die(subject: str) -> None:
        if next(left) <= 0:
            raise UnavailableError("killed")

    for method in METHODS:
        operator.blobs.before(method, die)
    with suppress(StoreError):
        operator.backend.forget("anna")
        return True
    operator.blobs.clear_faults()
    return False


@only_with_key
def test_open_handle_after_rotation_forgets_and_new_ones_honour_it(
    town: Town,
) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    engine.backend.rotate_key(StoreKey(SECRET[::-1].encode()))
    town.key_env = "PERSISTKV_OTHER_KEY"
    assert forget(town).packs == 1
    town.run(70)
    assert content_of(engine, "anna") == (0, [])
    assert fresh_content(town, "anna") == (0, [])


@only_with_key
def test_records_of_many_tenants_are_one_blob(town: Town) -> None:
    engine = town.engine()
    tenants = [f"tenant-{number}" for number in range(5)]
    for number, tenant in enumerate(tenants):
        store_one(engine, tenant, number)
    for tenant in tenants:
        forget(town, tenant)
    assert len(town.names("/forgotten/")) == 1
    for tenant in tenants:
        assert fresh_content(town, tenant) == (0, [])


@pytest.mark.parametrize("has_key", ["plain"], indirect=True)
def test_object_with_sealed_content_in_store_without_key_costs_only_itself(
    town: Town,
) -> None:
    store_one(town.engine(), "berta", 1)
    name = NAMES.new_commit(random.Random(1))
    body = encode(Delta(sealed=[bytes(100)]))
    town.server.put(name, [seal_object(name, body, PLAIN, NAMESPACE)])
    assert fresh_content(town, "berta")[0] == 1


def missing_key(town: Town, engine: Engine) -> None:
    town.server.delete(town.names("/tenants/"))


def damaged_key(town: Town, engine: Engine) -> None:
    for name in town.names("/tenants/"):
        town.server.put(name, [b"junk"])


@only_with_key
@pytest.mark.parametrize("harm", [missing_key, damaged_key])
def test_key_blob_that_somebody_harms_stops_no_other_tenant(
    town: Town,
    harm: Callable[[Town, Engine], None],
) -> None:
    engine = town.engine()
    store_one(engine, "anna", 1)
    town.run(30)
    harm(town, engine)
    other = town.engine()
    store_one(other, "berta", 2)
    town.run(200)
    assert fresh_content(town, "berta")[0] == 1
