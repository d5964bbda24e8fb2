"""The catalogue of a store: packs, manifests, eviction order, pins, ttl, change log and totals, as sorted table rows.

All drivers share this implementation. A driver supplies transactions over ``Rows`` and storage for payloads: see
``CatalogBackend``, and ``RowBackend`` for drivers that store payloads in rows, too.
"""

from persistkv.storage.catalog.backend import Catalog, CatalogBackend, RowBackend
from persistkv.storage.catalog.rows import TABLES, Rows
from persistkv.storage.catalog.transaction import LOG_ENTRIES, CatalogTransaction, Evicted, Payloads

__all__ = [
    "LOG_ENTRIES",
    "TABLES",
    "Catalog",
    "CatalogBackend",
    "CatalogTransaction",
    "Evicted",
    "Payloads",
    "RowBackend",
    "Rows",
]
