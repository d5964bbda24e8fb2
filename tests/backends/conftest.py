import pytest

pytest.register_assert_rewrite(
    "persistkv.testing.conformance",
    "tests.backends.catalogue_rules",
    "tests.backends.eviction_rules",
)
