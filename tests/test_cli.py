"""The command line: recipes and options compose, and every mistake is one line that says what to do."""

import errno
import json
import operator
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import made
import pytest
from families import FAMILIES, make_tokenizer
from published_targets import FOLDER

from eagle31_train import __main__ as console_script
from eagle31_train import cli, completion, compose
from eagle31_train import run as stages
from eagle31_train.cli import run
from eagle31_train.common import artifacts
from eagle31_train.common.errors import Stopped, UserError
from eagle31_train.common.locations import CONFIGS
from eagle31_train.compose import load_config
from eagle31_train.earlier import RENAMED

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "+experiment=smollm2"
OURS = str(ROOT / "data_prep" / "prompts" / "prompts.jsonl")  # its prompts


def message_of(*overrides):
    return made.message_of(load_config, list(overrides))


# ---------------------------------------------------------------- what composes


def test_a_recipe_and_options_compose():
    config = load_config([RECIPE, "train.lr=3e-4", "name=mine"])
    assert (config.name, config.run_dir, config.train.lr) == ("mine", "runs/mine", 3e-4)
    assert config.target.path == str(ROOT / "models" / "SmolLM2-135M-Instruct")


def lengths(*words):
    """How many tokens an answer, and a conversation, may have in a stage that is given these words."""
    taken = []
    run(taken.append, "", list(words))
    return taken[0].data.generate.max_new_tokens, taken[0].data.max_length


def test_a_target_that_thinks_has_room_for_it_where_no_recipe_is_named(tmp_path, capsys):
    """Its positions and template say so; one's own lengths, a recipe and a switch for thoughts count for more."""
    target = tmp_path / "target"
    described = json.loads((FOLDER / "qwen3_8b" / "config.json").read_text())
    make_tokenizer(FAMILIES["qwen3"]).save_pretrained(target)

    def own(*words, positions=40960):
        artifacts.write_json(target / "config.json", {**described, "max_position_embeddings": positions})
        return lengths(f"target.path={target}", "name=x", *words)

    assert own("data.prompts=p.jsonl") == own() == (4096, 6144)
    assert " with data.generate.max_new_tokens=4096 data.max_length=6144 (room for thoughts" in capsys.readouterr().out
    assert own("data.max_length=16384") == (4096, 16384)
    assert own("data.max_length=300") == (300, 300)
    assert own("data.generate.max_new_tokens=8192") == (8192, 10240)
    assert own("data.generate.max_new_tokens=64", "data.max_length=128") == (64, 128)
    assert own("data.conversations=c.jsonl") == (320, 6144), "nothing is answered"
    artifacts.write_json(tmp_path / "run" / "conversations.manifest.json", {"inputs": {"max_new_tokens": 64}})
    assert own(f"run_dir={tmp_path / 'run'}") == (64, 6144), "stopped between answers and data"
    capsys.readouterr()
    assert own("target.template_args.enable_thinking=false") == own(positions=6143) == (320, 2048)
    assert "for thoughts" not in capsys.readouterr().out
    assert own(compose.ANY) == (320, 2048)
    make_tokenizer(FAMILIES["smollm2"]).save_pretrained(target)
    assert own() == (320, 2048)


def test_a_run_goes_on_with_the_lengths_of_its_answers_where_no_recipe_is_named(tmp_path, monkeypatch):
    """As an earlier version, or another machine, began it: the target is not here."""
    monkeypatch.chdir(tmp_path)
    for file, inputs in {
        "runs/x/conversations.manifest.json": {"max_new_tokens": 64},
        "runs/x/data/manifest.json": {"max_length": 99},
        "shared/manifest.json": {"max_length": 77},
        "runs/w/data/manifest.json": {},
    }.items():
        artifacts.write_json(Path(file), {"inputs": inputs})
    away = "target.path=away/from-here"
    assert lengths(away, "name=x") == (64, 99)
    assert lengths(away, "name=x", "data.max_length=100") == (64, 100)
    assert lengths(away, "name=y", "data_dir=shared") == (320, 77)
    assert lengths(away, "name=w") == lengths(away, "name=z") == (320, 2048), "nothing is recorded"


NAMES = ["/tmp/ü (1)/a=b.jsonl", "天空/😀", "~x", "a~b", "[x]", "[1] x", "{a}", "{a: 1}", "it's", 'say "hi"', "'a'b"]
NAMES += ["a,b", " a  b ", "1e3", "true", "a#b!c;d&e<f>`g`|^", "range(1,2)", "back\\slash\\", "$x%y@z", "=", "(", "%20"]


def test_a_command_without_a_recipe_takes_any_and_says_so(capsys):
    taken = []
    run(taken.append, "", ["target.path=Qwen/Qwen3-8B", "name=x"])
    said = capsys.readouterr().out
    assert "no recipe given: using +experiment=any (configs/experiment/any.yaml); made for this target: +exp" in said
    run(taken.append, "", [compose.ANY, "target.path=Qwen/Qwen3-8B", "name=x"])
    assert "no recipe" not in capsys.readouterr().out
    assert taken[0] == taken[1] != load_config(["target.path=Qwen/Qwen3-8B", "name=x"])


def test_any_name_is_taken_as_it_is_without_quotes():
    read = ("train.time_limit", "store.cache_bytes", "store.max_bytes")  # as times and sizes
    options = [(name, option) for name, option in compose.OPTIONS.items() if name not in read]
    text = [name for name, (kind, at) in options if kind in (str, str | None) and not at.metadata["choices"]]
    assert {"name", "run_dir", "data.prompts", "target.path", "store.cache_dir"} <= set(text)
    given = dict(zip(text, [*NAMES, *NAMES], strict=False))
    # Where any type may stand, what is a number or a list to Hydra stays one.
    paths = [name for name in NAMES if name not in ("[x]", "{a}", "{a: 1}", " a  b ", "1e3", "true")]
    sources = [f"data.sources.s{i}.path={path}" for i, path in enumerate(paths)]
    folders = "comparisons=[runs/ü (1)/x, it's, plain]"
    config = load_config([*(f"{option}={name}" for option, name in given.items()), *sources, folders])
    assert {option: operator.attrgetter(option)(config) for option in given} == given
    assert len(given) >= len(NAMES)
    assert [config.data.sources[f"s{i}"]["path"] for i in range(len(paths))] == paths
    assert config.comparisons == ["runs/ü (1)/x", "it's", "plain"]


def test_a_path_in_the_users_home_is_found_there(tmp_path, monkeypatch):
    """In options and recipes; bash leaves what stands after `target.path=` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("# @package _global_\nname: mine\ntarget: {path: ~/model}\n")
    words = ["+experiment=~/mine.yaml", "store_dir=~/store", "data.sources.a.path=~/a.jsonl", "comparisons=[~/b]"]
    config = load_config(words)
    paths = [config.target.path, config.store_dir, config.data.sources["a"]["path"], *config.comparisons]
    assert paths == [str(tmp_path / name) for name in ("model", "store", "a.jsonl", "b")]


def test_quotes_and_other_values_of_hydras_grammar():
    quoted = [r"data.prompts=a\=b", "target.path='c d'", "name=x-1", "run_dir=runs/${name}", "data.conversations=null"]
    sources = ["data.sources.a.weight=2.5", "data.sources.b={path: 'p q', weight: 3}", "train.betas=[0.8,0.9]"]
    config = load_config([RECIPE, *quoted, *sources])
    assert (config.data.prompts, config.target.path, config.run_dir) == ("a=b", "c d", "runs/x-1")
    assert config.data.conversations is None
    assert config.data.sources == {"a": {"weight": 2.5}, "b": {"path": "p q", "weight": 3}}
    assert config.train.betas == [0.8, 0.9]


def test_recipes_are_found_in_files_and_folders_of_any_name(tmp_path):
    text = (CONFIGS / "experiment" / "smollm2.yaml").read_text().replace("name: smollm2", "name: mine")
    folder = tmp_path / "ü, (1)=[2]"
    (folder / "experiment").mkdir(parents=True)
    for name in ("smollm2", "it's a=b"):  # one is named as one of ours
        (folder / "experiment" / f"{name}.yaml").write_text(text)
        assert load_config([f"+experiment={folder}/experiment/{name}.yaml"]).name == "mine"
    assert load_config(["+experiment=it's a=b"], config_dir=folder).name == "mine"
    with pytest.raises(UserError, match=r"smollm2\.yaml has the name of one of eagle31's own files"):
        load_config([RECIPE], config_dir=folder)  # in silence Hydra would take ours
    with pytest.raises(UserError, match=r"--config-dir .*/none is not a folder"):
        load_config([RECIPE], config_dir=tmp_path / "none")


def test_a_recipe_without_a_header_is_one_and_what_is_no_text_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  lr: 0.5\n")
    assert load_config([f"+experiment={file}", "target.path=x"]).train.lr == 0.5
    file.write_text("")
    assert load_config([f"+experiment={file}", "target.path=x"]).name == "x"
    for text in (b"\xff\xfe", b"5"):
        file.write_bytes(text)
        with pytest.raises(UserError, match=r"mine\.yaml cannot be read \(.*\): write one"):
            load_config([f"+experiment={file}", "target.path=x"])
    file.write_text("trian: {lr: 0.5}\n")
    assert message_of(f"+experiment={file}").startswith(f"In {file}: no option 'trian': did you mean 'train'")


# ---------------------------------------------------------------- groups, and options that are emptied


def test_a_group_of_the_recipe_is_replaced():
    kimi = load_config(["+experiment=kimi"])
    other = load_config(["+experiment=kimi", "target=kimi_k25", "engine=transformers", "drafter=kimi_llama"])
    assert (kimi.target.path, other.target.path) == ("moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.5")
    assert (kimi.extract.engine, other.extract.engine) == ("vllm", "transformers")
    assert (kimi.drafter.architecture, other.drafter.architecture) == ("mla", "llama")
    assert (other.drafter.kv_lora_rank, other.train) == (None, kimi.train)


@pytest.mark.parametrize("twice", [["target=qwen3_8b", "target=kimi"], ["experiment=kimi", "experiment=smollm2"]])
def test_the_same_group_given_twice_is_an_error(twice):
    assert f"Multiple values for {twice[0].split('=')[0]}" in message_of("name=x", *twice)


@pytest.mark.parametrize(
    ("given", "answers", "prompts"),
    [
        ("data.prompts=p.jsonl", True, "p.jsonl"),
        ("data.prompts=self", True, "self"),
        ("data.sources.own.path=self", True, None),
        ("data.prompts=p.jsonl regenerate=false", False, "p.jsonl"),
        ("data.conversations=c.jsonl", False, None),
        ("data.sources.a.path=a.jsonl", False, None),  # prompts or conversations: nobody knows
        (RECIPE, False, OURS),  # has both
        (f"{RECIPE} data.conversations=null", True, OURS),
        (f"{RECIPE} regenerate=true", True, OURS),
        ("", True, "self"),  # the target writes them
        ("regenerate=true", True, "self"),
        ("regenerate=false", False, None),
    ],
)
def test_prompts_alone_are_answered_and_without_data_the_target_writes_them(given, answers, prompts):
    config = load_config(["target.path=x", *given.split()])
    assert (config.regenerate, config.data.prompts) == (answers, prompts)


def begun(folder, *words):
    """The folder of a run that was begun with these words."""
    saved = folder / "train" / "config.yaml"
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_text(compose.to_yaml(load_config(["target.path=x", *words])))
    return str(folder)


def test_what_a_run_is_given_anew_is_answered_or_not_as_if_it_had_no_answers_before(tmp_path):
    for before in ("data.prompts=p.jsonl", "data.conversations=c.jsonl"):
        run = begun(tmp_path, before)
        for given, answers in [
            (["data.prompts=q.jsonl", "data.conversations=null"], True),
            (["data.conversations=d.jsonl", "data.prompts=null"], False),
            (["data.prompts=q.jsonl", "data.conversations=null", "regenerate=false"], False),
            (["seed=3"], before.startswith("data.prompts")),
        ]:
            assert load_config([run, *given]).regenerate is answers
    begun(tmp_path)
    assert load_config([run, "data.sources.a.path=a.jsonl"]).data.prompts is None
    assert load_config([run, "train.lr=1"]).data.prompts == "self"


def test_a_free_form_option_is_emptied():
    """As the help of drafter.rope_scaling says: `{}` for none. Merged, it would change nothing, in silence."""
    for words in (["+experiment=kimi", "drafter.rope_scaling={}"], ["drafter.rope_scaling={}", "+experiment=kimi"]):
        assert load_config(words).drafter.rope_scaling == {}
    anew = ["+experiment=kimi", "drafter.rope_scaling={}", "drafter.rope_scaling.rope_type=default"]
    assert load_config(anew).drafter.rope_scaling == {"rope_type": "default"}
    assert load_config(["+experiment=smollm2", "drafter.rope_scaling={}"]).drafter.rope_scaling == {}
    assert load_config(["+experiment=kimi", "extract.engine_args={}"]).extract.engine_args == {}
    assert load_config(["+experiment=kimi", "drafter.rope_scaling.factor=2"]).drafter.rope_scaling["factor"] == 2


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("target=/models/smol", "no configs/target//models/smol.yaml: did you mean target.path=/models/smol?"),
        ("trian.lr=1", "no option 'trian.lr': did you mean 'train.lr'?"),
        ("+experimnt=smollm2", "no option 'experimnt': did you mean 'experiment'?"),
        ("+experiment=smolm2", "no configs/experiment/smolm2.yaml: did you mean 'smollm2'?"),
        ("train.learning_rate=1", "no option 'train.learning_rate' (available: train.activation_checkpointing, "),
        ("+target=zzz", "no configs/target/zzz.yaml (available: kimi, kimi_k25, kimi_toy, "),
        ("train.lr", "'train.lr' is not of the form key=value"),
        ("", "'' is not of the form key=value"),  # a shell's variable that is not set, in quotes
        ("train.lr=fast", "train.lr=fast: Value 'fast' of type 'str' could not be converted to Float"),
        ("seed=1" + 30 * "0", "must be at least 0 and at most "),
        ("train.ttt_length=1000000000", "must be at least 1 and at most "),  # what would end in no memory
        ("drafter.num_layers=100000", "must be at least 1 and at most "),
        ("train.betas=0.9", "train.betas is a list: write 'train.betas=[0.9]'"),
        ("target.aux_layers=${train.lr}", "target.aux_layers=0.003 is not a list"),
        ("target.aux_layers=[[1]]", "target.aux_layers=[[1]] is not a list of single values"),
        ("extract.engine_args=${name}", "extract.engine_args=smollm2 is not a mapping"),
        ("extract.engine_args.tensor_parallel_size=x", "tensor_parallel_size=x must be a whole number of devices"),
        ("train.betas=[0.9", "'train.betas=[0.9' cannot be read"),
        ("data.sources.en={path: a=b}", "'data.sources.en={path: a=b}' cannot be read"),
        ("name=", "name= is empty: set name=… to a value"),
        ("name=plain", "name=plain is reserved for decoding without a drafter: choose another name"),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest_right_one(override, words):
    assert words in message_of(RECIPE, override)


@pytest.mark.parametrize(
    ("given", "fine"),
    [
        ("extract.engine_args.tensor_parallel_size=0", "extract.engine_args.tensor_parallel_size=1"),
        ("train.init_revision=v1", "train.init_from=a/b"),
        ("data.rows=9", "data.sources={a: null, b: {path: p}}"),
        ("evaluate.serve_speculative_tokens=[]", "evaluate.serve_speculative_tokens=[1]"),
        ("evaluate.concurrency=[]", "evaluate.concurrency=[1]"),
    ],
)
def test_an_option_that_means_nothing_alone_is_named_and_taken_with_what_it_needs(given, fine):
    assert given in message_of(RECIPE, given)
    load_config([RECIPE, given, fine])


def test_a_target_that_is_not_given_is_asked_for():
    for words in ([], ["name=x"], ["+experiment=any"]):
        assert message_of(*words).startswith("no value for target.path: set target.path=…")
    assert load_config(["target.path=org/Some-Target"]).name == "some-target"


def test_a_run_in_its_targets_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "Mine" / "runs").mkdir(parents=True)
    for folder, path in (("Mine", "."), ("Mine/runs", ".."), (".", "Mine/")):
        monkeypatch.chdir(tmp_path / folder)
        assert load_config([f"target.path={path}"]).name == "mine"


def test_an_old_name_is_understood_and_says_the_new_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(RENAMED, "train.rate", "train.lr")
    for name in ("_schema", "_shipped"):  # which are worked out once
        monkeypatch.setattr(compose, name, getattr(compose, name).__wrapped__)
    config = load_config([RECIPE, "train.rate=0.5"])
    assert config.train.lr == 0.5
    assert capsys.readouterr().err == "train.rate has been renamed train.lr\n"
    (tmp_path / "saved.yaml").write_text(compose.to_yaml(config).replace("  lr:", "  rate:"))
    assert load_config([], tmp_path / "saved.yaml") == config
    capsys.readouterr()
    recipe = (CONFIGS / "experiment" / "smollm2.yaml").read_text()
    assert "  lr: " in recipe
    (tmp_path / "old.yaml").write_text(recipe.replace("  lr: ", "  rate: ") + "plan: {layers: 3}\n")
    assert load_config([f"+experiment={tmp_path / 'old.yaml'}"]).train == load_config([RECIPE]).train
    assert load_config([RECIPE, "plan.layers=3"]).plan == load_config([RECIPE]).plan
    removed = "plan.layers no longer exists (it is now read from the target's config.json): remove it\n"
    assert capsys.readouterr().err == "train.rate has been renamed train.lr\n" + 2 * removed
    assert load_config([RECIPE, "train.compile=true"]) == load_config([RECIPE])
    assert "train.compile no longer exists" in capsys.readouterr().err
    assert "train.rate has been renamed train.lr: set only train.lr" in message_of(RECIPE, "train.rate=1", "train.lr=2")


@pytest.mark.parametrize(
    ("unset", "given", "name"),
    [
        ("export_weights: target\nevaluate:", "export_weights: int8\nevaluate:", "export_weights"),
        ("evaluate:\n  leave_out: []", "evaluate:\n  leave_out: [a]", "evaluate.leave_out"),
    ],
)
def test_an_option_that_is_gone_is_told_of_where_it_was_set(unset, given, name, tmp_path, capsys):
    config, saved = load_config([RECIPE]), tmp_path / "saved.yaml"
    for text, said in ((unset, 0), (given, 1)):
        saved.write_text(compose.to_yaml(config).replace("\nevaluate:", f"\n{text}"))
        assert load_config([], saved) == config
        assert capsys.readouterr().err.count(f"{name} no longer exists (") == said


# ---------------------------------------------------------------- run


def test_ctrl_c_while_libraries_are_imported_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["eagle31", "train"])
    monkeypatch.setattr(console_script.runpy, "run_module", Mock(side_effect=KeyboardInterrupt))
    assert made.status_of(console_script.main) == 130
    assert capsys.readouterr().err == "stopped; run the same command again to resume\n"


@pytest.mark.parametrize("module", ["data_prep.__main__", "eagle31_train.extract", "eagle31_train.plan", "train.loop"])
def test_a_command_waits_for_no_library_before_its_options_are_read(module):
    seen = f"import sys, {module}; print(*({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True).stdout == "\n"


ENDINGS = [
    (UserError("the file is missing: make it"), 2, "error: the file is missing: make it"),
    (OSError(errno.ENOSPC, "No space", "/some/file"), 2, "error: cannot use /some/file (No space): free some space"),
    (OSError(errno.ENOSPC, "No space"), 2, "error: [Errno 28] No space: free some space"),
    (OSError(errno.EROFS, "Read-only", "/x"), 2, "error: cannot use /x (Read-only): choose another place"),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x"), 2, "(Not a directory): correct the option or perm"),
    (Stopped("saved after step 3"), 75, "saved after step 3"),
    (KeyboardInterrupt(), 130, "stopped; run the same command again to resume"),
]


@pytest.mark.parametrize(("error", "status", "words"), ENDINGS)
def test_how_a_stage_ends_is_one_line_and_a_status(capsys, error, status, words):
    assert made.status_of(run, Mock(side_effect=error), "A stage.", [RECIPE]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_each_command_completes_what_it_takes(capsys):
    """The last of the words, by bash."""
    completion.main(["bash"])
    shell = capsys.readouterr().out
    line = 'COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1))'
    complete = line + '; _eagle31; printf "%s\\n" "${COMPREPLY[@]}"'
    for words, wanted in {
        "run --p": ["--profile"],
        "run --from ": list(stages.STAGES),
        "run --profile zero3": ["zero3", "zero3_offload"],
        "compare a +suite=mt": ["mt_bench"],  # bash itself divides words at =
        "evaluate train.bet": ["train.betas="],
        "store ": ["verify", "info"],
    }.items():
        command = ["bash", "-c", f"{shell}\n{complete}", "bash", "eagle31", *words.split(" ")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == wanted, words
    assert "COMP_WORDBREAKS=" not in shell, "it is other programs', too"


def test_a_recipe_or_run_that_is_here_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("target: {path: x}")
    assert message_of("+experiment=mine") == (
        "no configs/experiment/mine.yaml: for the file in this folder, pass +experiment=mine.yaml"
    )
    Path("mine.yaml").write_text("name: mine")
    assert message_of("+experiment=mine.yaml") == "no value for target.path: set target.path in mine.yaml"
    run = begun(Path("runs/qwen"), "name=qwen")
    assert message_of("name=qwen").endswith("pass the run itself, runs/qwen, to use its options")
    assert load_config([f"+experiment={run}/train/config.yaml"]).target.path == "x"


def test_a_runs_folder_stands_for_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [begun(Path("moved/qwen"), "name=qwen", "train.lr=0.5", "overwrite=true"), "train.epochs=7"]
    assert cli.with_recipe(words) == words
    config = load_config(words)
    assert (config.name, config.run_dir, config.train.lr, config.train.epochs) == ("qwen", "moved/qwen", 0.5, 7)
    assert not config.overwrite, "of the command that began the run alone"
    assert load_config([*words, "overwrite=true"]).overwrite
    assert load_config([*words, "name=b"]).run_dir == "runs/b"
    shutil.copytree("moved/qwen", "lr=1")
    assert load_config(["lr=1"]).run_dir == "lr=1"
    shutil.copytree("moved/qwen", "other")
    assert message_of(*words, "other") == "moved/qwen and other are different runs: pass only one"
