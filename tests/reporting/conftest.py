import io

import pytest
from PIL import Image

from eagle31_train.reporting.figures import THEMES, Picture


@pytest.fixture
def small(monkeypatch):
    """Small pictures."""
    for theme in THEMES.values():
        monkeypatch.setitem(theme, "savefig.dpi", 25)


@pytest.fixture
def quick(monkeypatch):
    """Pictures that are laid out by nobody: what matplotlib takes its time for."""
    blank = io.BytesIO()
    Image.new("L", (1, 1)).save(blank, "PNG")

    def png(self, theme):
        self.figure(theme)
        return blank.getvalue()

    monkeypatch.setattr(Picture, "png", png)
