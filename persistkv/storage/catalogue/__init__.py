"""The catalogue of a store: packs, manifests, eviction order, pins, ttl, change log and totals, in
tables of LMDB.

The local store and the replicas of a shared one use it. ``Catalogue`` answers queries;
``CatalogTransaction`` changes the tables within a transaction of the store.

**Eviction.** A store with a capacity evicts packs and manifests, across all its namespaces: in
``commit``, or, if it is remote, in one of its processes soon after a commit.

1. Low priority is evicted first, then the least recently used. Each commit that uses something
   (writes it, or names it in ``touches``) is one moment. At the same moment, the order is: packs of
   unknown depth (``Frame.depth``), deeper packs, shallower ones, manifests. A local store numbers
   the moments with a counter. A shared store, whose commits arrive in any order, uses their times.
2. Writing a manifest uses all packs that it names: a prefix is never evicted before the packs that
   depend on it.
3. Deleting or evicting a pack deletes the manifests that name it, and the packs after it in these
   manifests unless other manifests name them. Packs before it are kept and found by key, but no
   manifest lists the whole context.
4. A manifest is used only when it is written: later use of its packs does not delay its eviction or
   expiry.
5. Pinned manifests and their packs are neither evicted nor deleted by the store's ttl.
   ``deletions`` and ``bad`` still delete them.
6. If the store has a ttl, later commits delete packs and manifests that were unused for that long,
   even if there is enough room.
7. A manifest with a ttl of its own (``RequestManifest.ttl_s``) expires if its last pack was unused
   for that long, even if it is pinned. A later commit deletes it together with those of its packs
   that were unused for that long and that no other manifest names.
8. If a tenant is above its quota, its packs are evicted before those of others, in the order above.
   A commit that adds packs of a tenant evicts until the tenant is not above its quota.
9. A pack has low priority if manifests of low priority, and no others, have named it since it was
   written.
"""

from persistkv.storage.catalogue.catalogue import Catalogue
from persistkv.storage.catalogue.rows import TABLES, TableRows
from persistkv.storage.catalogue.transaction import (
    LOG_ENTRIES,
    CatalogTransaction,
    EvictionEnd,
    Payloads,
)

__all__ = [
    "LOG_ENTRIES",
    "TABLES",
    "CatalogTransaction",
    "Catalogue",
    "EvictionEnd",
    "Payloads",
    "TableRows",
]
