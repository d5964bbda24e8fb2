import pytest

pytest.register_assert_rewrite(
    "tests.backends.catalogue_rules", "tests.backends.eviction_rules"
)
