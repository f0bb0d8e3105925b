"""What others wrote reaches no terminal, page or card raw."""

import logging
import re
import sys
import unicodedata
import warnings
from pathlib import Path

import pytest

from eagle31_train.common import shown
from eagle31_train.common.console import Progress, explained, note, tidy
from eagle31_train.common.errors import UserError
from eagle31_train.reporting import html, markdown
from eagle31_train.reporting.figures import Picture
from eagle31_train.reporting.tables import Section, Table

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9b31m\u202egpj.exe\u2066\u200b\r\ud800\U000e0041c"
SPELT = r"a\x1b[2J\x1b]0;title\x07b\x9b31m\u202egpj.exe\u2066\u200b\r\ud800\U000e0041c"
# Of category Cf: letters of scripts that are seen, and the two joiners.
SEEN = {0x200C, 0x200D, 0x70F, 0x8E2, 0x6DD, 0x110BD, 0x110CD, *range(0x600, 0x606), *range(0x890, 0x892)}
SEEN |= set(range(0x13430, 0x13440))


def test_exactly_what_acts_unseen_is_spelt():
    for code in range(sys.maxunicode + 1):
        letter = chr(code)
        acts = unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") or code in (0xFFFE, 0xFFFF)
        # Of the planes for language tags and of \u2060-\u206f also what is not assigned yet.
        acts = acts or 0xE0000 <= code < 0xE0080 or 0x2060 <= code < 0x2070
        acts = acts and letter not in "\n\t" and code not in SEEN
        assert (shown.clean(letter) != letter) == acts, hex(code)
        assert not acts or (shown.clean(letter).isascii() and shown.clean(letter).isprintable())


def test_an_error_is_one_line_of_bounded_length_and_spelt_once():
    assert shown.clean(HOSTILE) == SPELT == shown.clean(SPELT)
    assert shown.clean("Größe, 你好, 👩\u200d👧\n\tx") == "Größe, 你好, 👩\u200d👧\n\tx"
    assert str(UserError(f"{HOSTILE}\nsecond\u2028third")) == SPELT.replace(r"\r", " ") + " second third"
    long = str(UserError("what: " + "x" * 10**6 + ": do this"))
    assert len(long) < 2000
    assert long.startswith("what: xxx")
    assert long.endswith("xxx: do this")


def test_a_terminal_sees_no_command(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        note(HOSTILE)
        note(HOSTILE, error=True)
        for error in (UserError(HOSTILE), FileExistsError(17, HOSTILE, HOSTILE)):
            with pytest.raises(SystemExit), explained():
                raise error
        with Progress(total=3, desc=HOSTILE, mininterval=0) as bar:
            bar.update()
        said = capsys.readouterr()
        assert said.out == SPELT + "\n"
        assert not any(sign in said.err for sign in "\x1b\x07\x9b\u202e\u2066\ud800")


def test_what_libraries_log_and_warn_of_is_cleaned_too(capsys):
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("somebody").addHandler(handler)
    with tidy():
        logging.getLogger("somebody").error("of %s", HOSTILE)
        print(warnings.formatwarning(HOSTILE, UserWarning, "file", 1), file=sys.stderr)
    logging.getLogger("somebody").removeHandler(handler)
    said = capsys.readouterr().err
    assert f"of {SPELT}\n" in said
    assert f"UserWarning: {SPELT}\n" in said


def test_pages_and_cards_show_it_spelt():
    section = Section(HOSTILE, [HOSTILE], [Table(HOSTILE, [HOSTILE], [[HOSTILE]])] * 2)
    page = html.page(HOSTILE, [section], {HOSTILE: [(HOSTILE, "data:")]}, {HOSTILE: HOSTILE})
    card = "".join([markdown.plain(HOSTILE), markdown.code(HOSTILE), markdown.grid([HOSTILE], [[HOSTILE]])])
    for text in (page, card):
        assert shown.clean(text) == text
        assert "gpj.exe" in text
    picture = Picture("p", "s", rf"{HOSTILE} $\frac{{$", lambda axes: axes.set_xlabel(r"$\bad{"), HOSTILE)
    assert "".join(picture.figure().get_suptitle().split()) == rf"{SPELT}$\frac{{$"  # on two lines
    assert picture.png().startswith(b"\x89PNG")


def test_nothing_else_prints_or_makes_html_and_markdown_of_text():
    """ruff's T201 keeps `print` to the console; what else could go past it."""
    other = re.compile(
        r"(sys\.std(out|err)|tqdm)\.write|\w\.print\(|^\s*(from html import|import html\b)", re.MULTILINE
    )
    for folder in ("eagle31_train", "train", "data_prep"):
        found = {path.name for path in (ROOT / folder).rglob("*.py") if other.search(path.read_text())}
        assert found <= {"console.py", "html.py"}
