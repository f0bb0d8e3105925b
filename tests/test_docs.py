"""The documentation: the site builds strictly and asks for nothing outside; commands, options and paths are real.

Blocks of Python run in tests/test_api.py. docs/log.md tells of the past, with the names of its day: it is only built.
"""

import argparse
import functools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle31_train import compose, new
from eagle31_train.__main__ import COMMANDS
from eagle31_train.common.errors import UserError
from eagle31_train.compare import is_drafter
from eagle31_train.earlier import RENAMED
from eagle31_train.reporting.recipe import sglang_command

ROOT = Path(__file__).resolve().parent.parent
PAGES_ELSEWHERE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md"]
BUILT = [*PAGES_ELSEWHERE, "CITATION.cff", "LICENSE", "docs"]
PAGES = [ROOT / name for name in PAGES_ELSEWHERE]
PAGES += sorted(ROOT.glob("docs/*.md"))
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES if page.name != "log.md"}
SECTIONS = {name.partition(".")[0] for name in compose.OPTIONS if "." in name}


def test_the_page_of_options_is_what_the_options_say():
    page = runpy.run_path(str(ROOT / "docs" / "options.py"))["page"]()
    assert TEXTS["docs/options.md"] == page, "run `python docs/options.py`"


# ---------------------------------------------------------------- the site


def build(source, out):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", source / "docs"]
    return subprocess.run(
        [*command, "-d", out / "doctrees", source, out / "site"], capture_output=True, text=True, check=False
    )


def test_the_site_builds_strictly_and_asks_for_nothing_outside(tmp_path):
    source = tmp_path / "source"
    for name in BUILT:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, source / name)
    # What pages link to beside each other is code, which is not copied: a link to it is checked for itself, below.
    for link in re.findall(r"\]\(([^)#:]+\.(?:py|yaml|json))\)", "".join(TEXTS.values())):
        assert "results/" in link, f"{link}: link to pages and results, and name code in backticks"
    built = build(source, tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    fetched = r"""<(?:script|img|iframe|source)\b[^>]*\ssrc="(?:https?:)?//|<link\b[^>]*\shref="(?:https?:)?//"""
    assert [page.name for page in pages if re.search(fetched, page.read_text())] == []
    shown = [(page, link) for page in pages for link in re.findall(r' src(?:set)?="([^":?]+)', page.read_text())]
    assert sum("pictures/" in link for _, link in shown) >= 4  # of `<picture>`, raw HTML to Sphinx
    assert [link for page, link in shown if not (page.parent / link).is_file()] == []
    imported = r"""(url\(|@import)\s*['"]?(https?:)?//"""
    styles = (tmp_path / "site").rglob("*.css")
    assert [style.name for style in styles if re.search(imported, style.read_text())] == []

    # A page, an anchor and a picture that are not there, and a page that no navigation leads to.
    with (source / "docs" / "data.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](store.md#nowhere)\n\n![c](results/nowhere.png)\n")
    (source / "docs" / "lost.md").write_text("# Lost\n")
    broken = build(source, tmp_path)
    assert broken.returncode
    for complaint in ("'nowhere.md'", "'nowhere'", "results/nowhere.png", "lost.md: WARNING: document isn't included"):
        assert complaint in broken.stderr


def test_every_dependency_is_listed_with_its_bounds():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = set(project["dependencies"]).union(*project["optional-dependencies"].values())
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", TEXTS["docs/dependencies.md"], re.MULTILINE)
    assert {name for name, _, _ in rows} == wanted
    assert all(licence.strip() and reason.strip() for _, licence, reason in rows)


# ---------------------------------------------------------------- commands, options, paths


def commands(text):
    """Command lines of a page: in code blocks and in backticks; without comments, continued lines joined."""
    fenced = [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind in ("", "sh")]
    indented = re.findall(r"^    (?! )(.+)", text, re.M)
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = "\n".join(fenced).replace("\\\n", " ").splitlines() + indented + [" ".join(code.split()) for code in inline]
    for line in lines:
        line = re.sub(r"^\s*(ACCELERATE_USE_CPU=true )?\s*", "", re.sub(r"^srun bash -c '(.*)'$", r"\1", line))
        if re.match(r"(eagle31|make|accelerate|torchrun|vllm|python|\S*/bin/python)\s+\S", line):
            yield re.sub(r"\s&$", "", re.sub(r"\s#\s.*", "", line)).strip()


def module_file(name):
    base = ROOT.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__main__.py") if file.is_file()), None)


def check(line):
    """Parse a command line as its program would.

    Raises:
        AssertionError, UserError, ValueError: it names something that there is not.
    """
    words = [word for word in shlex.split(re.sub(r"\$\(\([^)]*\)\)|\$\w+", "1", line)) if word not in ("…", "...")]
    program, *rest = words
    if program == "make":
        targets = {word for word in rest if "=" not in word}
        known = set(re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split())
        assert targets, "make what?"
        assert targets <= known, f"no target {targets - known}"
    elif program == "vllm":
        if "--speculative-config" in rest:
            values = json.loads(rest[rest.index("--speculative-config") + 1])
            optional = {"parallel_drafting", "draft_sample_method"}
            assert values.keys() - optional == {"method", "model", "num_speculative_tokens"}
            assert values["method"] == "eagle3"
    elif program == "eagle31":
        if rest != ["--help"]:
            check_command(rest[0], rest[1:])
    elif program in ("accelerate", "torchrun"):
        check_launch(program, rest)
    elif rest[0] == "train.py":
        check_options(rest[1:])
    elif rest[:2] == ["-m", "sglang.launch_server"]:  # not installed: as export prints it
        assert words == shlex.split(
            sglang_command(load(("+experiment=smollm2",)), "runs/smollm2/export", None, published=True)
        )
    elif rest[0] == "-m":
        check_module(rest[1], rest[2:])


def check_module(name, words):
    stages = {module: command for command, (module, _) in COMMANDS.items()}
    if name in stages:
        return check_command(stages[name], words)
    file = module_file(name)
    assert file, f"no module {name}"
    words = words[: words.index("--")] if "--" in words else words
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in file.read_text()]
    assert not missing, f"{name} has no {missing}"
    return None


def check_command(command, words):
    assert command in COMMANDS, f"no command {command}"
    if command in ("new", "completion", "report", "store"):  # of their own arguments
        file = module_file(COMMANDS[command][0])
        flags = [word for word in words if word.startswith("--")]
        assert all(f'"{flag}"' in file.read_text() for flag in flags), f"{command} has no {flags}"
        return
    if command == "run":
        words = [word for word in words if word not in ("--from", "--until", *COMMANDS)]
    if command == "compare":
        words = [word for word in words if word[0] in "+~" or not is_drafter(word)]
    check_options(words)


def check_options(words):
    words = [word for word in words if not re.fullmatch(r"--cfg|--help|.*….*|\+?experiment=(NAME|FILE.yaml|x)", word)]
    if not any(re.match(r"\+?(experiment|target\.path)=", word) for word in words):
        words = [*words, "target.path=HUB-ID"]
    assert not {word.partition("=")[0] for word in words} & RENAMED.keys(), "an old name"
    load(tuple(words))


load = functools.cache(lambda words: compose.load_config(list(words)))


def check_launch(program, words):
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    if program == "accelerate":
        assert words[0] == "launch"
        words = words[1:]
    parser = launch_command_parser() if program == "accelerate" else get_args_parser()
    parser.error = lambda message: pytest.fail(f"{program}: {message}")
    if "-m" in words:
        at = words.index("-m")
        return check_module(words[at + 1], words[at + 2 :])
    if not any(word.endswith(".py") for word in words):  # named in a sentence
        words = [*words, "train.py"]
    parsed: argparse.Namespace = parser.parse_args(words)
    assert (ROOT / parsed.training_script).is_file(), parsed.training_script
    if getattr(parsed, "config_file", None):
        assert (ROOT / parsed.config_file).is_file(), parsed.config_file
    return check_options(parsed.training_script_args)


def test_commands_are_taken_by_their_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new.main(["mine"])  # the recipe that pages speak of, with its target set
    recipe = Path("mine.yaml")
    recipe.write_text(recipe.read_text().replace("???", "HUB-ID"))
    wrong = []
    for page, text in TEXTS.items():
        for line in dict.fromkeys(commands(text)):
            try:
                check(line)
            except (AssertionError, UserError, ValueError, pytest.fail.Exception) as error:
                wrong.append(f"{page}: {line}\n    {error}")
    assert not wrong, "\n".join(wrong)


def test_options_and_paths_exist():
    names, wrong = compose.OPTIONS, []
    option = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.(?!py|json|safetensors)[a-z_0-9.]+(?=[=\s]|$)")
    path = re.compile(
        r"(eagle31_train|train|data_prep|configs|docs|tests|benchmarks)/[\w/.-]+(/|\.(py|yaml|md|sh|svg))"
    )
    for page, text in TEXTS.items():
        codes = re.findall(r"`([^`\n]+)`", text)
        options = {word for code in codes for word in option.findall(code)}
        wrong += [
            (page, one)
            for one in options
            if not any(name.startswith(one) or one.startswith(f"{name}.") for name in names)
        ]
        wrong += [(page, code) for code in codes if path.fullmatch(code) and not (ROOT / code).exists()]
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "eagle31 plane target.path=x",
        "eagle31 plan target.pth=x",
        "python -m data_prep +experiment=smollm3",
        "python -m eagle31_train.evaluate +experiment=smollm2 evaluate.num_prompts=many",
        "python -m eagle31_train.compare runs/a runs/b compare.verify=8",
        "python -m benchmarks.growth --fast",
        "accelerate launch --config_file configs/accelerate/dpp.yaml train.py +experiment=kimi",
        "accelerate launch --num_process 8 trainer.py",
        "make tests",
        """vllm serve x --speculative-config '{"method": "eagle", "model": "y", "num_speculative_tokens": 3}'""",
    ],
)
def test_a_mistaken_command_is_seen(line):
    with pytest.raises((AssertionError, UserError, ValueError, pytest.fail.Exception)):
        check(line)
