import pytest

pytest.register_assert_rewrite("persistkv.testing.conformance")
