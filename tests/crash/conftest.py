import subprocess
from pathlib import Path

import pytest

from tests.crash.recorder import build_recorder, find_compiler


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """The recorder library. Skip the test if it cannot be built."""
    if find_compiler() is None:
        pytest.skip("no C compiler is installed to build the recorder")
    try:
        return build_recorder(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("the C compiler cannot build a shared library")
