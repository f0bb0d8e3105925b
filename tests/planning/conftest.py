"""Plans of the tests are for eight H100, on any machine."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
