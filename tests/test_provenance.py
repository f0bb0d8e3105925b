"""Up to date means: made from the wanted inputs, and every file as it was written."""

import pytest

from eagle31_train import artifacts, provenance
from eagle31_train.cli import load_config
from eagle31_train.config import RENAMED
from eagle31_train.errors import UserError
from eagle31_train.provenance import Provenance

pytestmark = pytest.mark.core
INPUTS = {"data": "abc", "train": {"lr": 0.1, "betas": [0.9, 0.95]}}


def make_stage(folder, inputs=INPUTS, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    listed = artifacts.list_files(folder, folder.iterdir())
    artifacts.write_json(folder / artifacts.MANIFEST, Provenance(inputs).record(files=listed))


def up_to_date(folder, inputs=INPUTS, overwrite=False, **options):
    return provenance.up_to_date(folder, Provenance(inputs), overwrite, **options)


def test_only_a_whole_output_of_the_same_inputs_is_up_to_date(tmp_path):
    assert not up_to_date(tmp_path / "out")
    make_stage(tmp_path / "out", a="one")
    assert up_to_date(tmp_path / "out")
    assert up_to_date(tmp_path / "out", {"train": {"betas": [0.9, 0.95], "lr": 0.1}, "data": "abc"}), "in any order"
    (tmp_path / "out" / artifacts.MANIFEST).unlink()
    assert not up_to_date(tmp_path / "out")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_text("on"), "has 2 bytes, not 3: truncated or replaced"),
        (lambda file: file.write_text("eno"), "does not match its checksum: damaged or replaced"),
    ],
)
def test_a_damaged_file_is_named_and_its_output_made_again(tmp_path, capsys, harm, words):
    make_stage(tmp_path / "out", a="one", b="two")
    harm(tmp_path / "out" / "a")
    assert not up_to_date(tmp_path / "out")
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'a'} {words}; making {tmp_path / 'out'} again\n"
    assert (tmp_path / "out" / "b").exists()


def test_an_output_of_other_inputs_is_refused_with_what_differs_or_replaced_when_asked(tmp_path):
    make_stage(tmp_path / "out", a="one")
    other = {"data": "abc", "train": {"lr": 0.2, "betas": [0.9, 0.95]}}
    with pytest.raises(UserError, match=r"train\.lr: 0\.1 there, 0\.2 here\): choose another name=") as error:
        up_to_date(tmp_path / "out", other)
    assert str(tmp_path / "out") in str(error.value)
    assert up_to_date(tmp_path / "out"), "nothing was touched"
    assert not up_to_date(tmp_path / "out", other, overwrite=True)
    assert not (tmp_path / "out").exists()


def test_a_card_may_change_without_its_checkpoint(tmp_path):
    made_from = Provenance(INPUTS, card={"repo": None})
    record = tmp_path / "export.json"
    artifacts.write_json(record, made_from.record(files={}))
    asked = {"same": made_from, "card": Provenance(INPUTS, {"repo": "me/it"}), "none": Provenance({**INPUTS, "x": 1})}
    whole = {name: provenance.whole(tmp_path, record, one, name == "none", "export") for name, one in asked.items()}
    assert whole == {"same": True, "card": False, "none": False}


def test_records_keep_the_names_that_options_had(monkeypatch):
    """Else a renamed option would put every earlier output out of date."""
    before = provenance.of_training(load_config(["+experiment=smollm2"]), "s", "d", "v" * 64, None)
    monkeypatch.setitem(RENAMED, "train.gamma_of_old", "train.gamma")
    after = provenance.of_training(load_config(["+experiment=smollm2"]), "s", "d", "v" * 64, None)
    assert after.inputs["train"]["gamma_of_old"] == before.inputs["train"]["gamma"]
    assert "gamma" not in after.inputs["train"]


def test_what_steers_no_weight_is_no_input_of_training():
    def inputs(*options):
        return provenance.of_training(load_config(["+experiment=smollm2", *options]), "s", "d", "v" * 64, None)

    assert inputs("train.wandb=disabled", "train.time_limit=1h", "train.num_workers=4").matches(inputs().record())
    assert not inputs("train.lr=1").matches(inputs().record())
    assert not inputs("seed=9").matches(inputs().record())


def test_what_chooses_the_step_is_an_input_where_one_is_chosen_and_nowhere_else():
    """Else no run from before there were such options would be up to date."""

    def inputs(chosen_on, *options):
        config = load_config(["+experiment=smollm2", *options])
        return provenance.of_training(config, "s", "d", "v" * 64, None, chosen_on).inputs["train"]

    assert not {"keep_best", "early_stop", "choice"} & inputs(None, "train.eval_every=7").keys()
    assert inputs(["prompt"], "train.early_stop=3", "train.eval_every=7")["choice"] == {
        **{"keep_best": False, "early_stop": 3, "prompts": ["prompt"], "every": 7},
        **{"dtype": "float32", "draft_tokens": 3},
    }
