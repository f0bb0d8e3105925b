"""A run extracted by one command, without interruption."""

import pytest
from pipeline import make_run, tiny_config

from eagle31_train.targets.extraction import extract


@pytest.fixture
def run(tmp_path):
    """tmp_path with a target and its data, ready to be extracted."""
    make_run(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    make_run(folder)
    extract(tiny_config(folder))
    return folder
