"""LMCache's ``cache_salt`` as the tenant of an object."""

from __future__ import annotations

import logging
import threading
from typing import Any

from persistkv.integrations.lmcache.keys import salt_of
from persistkv.tenants import DEFAULT_TENANT, UnnamedTenant, is_tenant

logger = logging.getLogger(__name__)


def tenant_of(encoded: bytes) -> str:
    """Return the tenant of an encoded key: its salt, or the default tenant if it has none."""
    return salt_of(encoded) or DEFAULT_TENANT


def salt_of_tenant(tenant: str) -> str:
    """Return the salt of a tenant's objects; none for the default tenant."""
    return "" if tenant == DEFAULT_TENANT else tenant


class SaltRules:
    """Which objects are stored and found: those whose salt is the name of a tenant. Thread-safe.

    :param unsalted: option ``tenant``, for objects without a salt.
    """

    def __init__(self, unsalted: UnnamedTenant) -> None:
        self._requires_salt = unsalted == "required"
        """Whether objects without a salt are refused."""
        self._lock = threading.Lock()
        self.num_refused = 0
        """Objects of tasks that were neither stored nor looked up."""

    def accepts(self, key: Any) -> bool:
        """Return whether LMCache's ``ObjectKey`` belongs to a tenant. Count each key that does not,
        and log the first one."""
        problem = self._problem_of(key.cache_salt)
        if problem is None:
            return True
        with self._lock:
            is_first = self.num_refused == 0
            self.num_refused += 1
        if is_first:
            logger.warning(
                "an object is neither stored nor found: %s. Further such objects are counted as "
                "refused_objects of report_status",
                problem,
            )
        return False

    def _problem_of(self, salt: str) -> str | None:
        """Return why an object with this salt belongs to no tenant; None: it belongs to one."""
        if not salt:
            # keys without a salt are the default tenant's, unless the option requires a salt
            if self._requires_salt:
                return "it has no cache_salt, and the option tenant is required"
            return None
        if not is_tenant(salt):
            return (
                f"its cache_salt of {len(salt)} characters is no tenant's name: expected at most "
                f"128 characters without control characters"
            )
        return None
