import pytest

from eagle31_train.reporting import figures


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small pictures."""
    monkeypatch.setitem(figures.STYLE, "savefig.dpi", 25)
