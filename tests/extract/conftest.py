"""What is extracted here; by one command, without interruption, it is `extracted` of ../conftest.py."""

import pytest
from pipeline import make_run


@pytest.fixture
def run(tmp_path):
    """tmp_path with a target and its data, ready to be extracted."""
    make_run(tmp_path)
    return tmp_path
