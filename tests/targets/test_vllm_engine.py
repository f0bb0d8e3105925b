"""What the vLLM engine does around vLLM; the engine itself runs in tests/vllm."""

from eagle31_train.targets import vllm_engine
from eagle31_train.targets.vllm_engine import states_folder


def test_a_folder_whose_lock_nobody_holds_is_removed_and_a_held_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "RAM_DISK", ram := tmp_path)
    mine = states_folder(1)
    (ram / f"{vllm_engine.FOLDER}-dead").mkdir()
    another = states_folder(1)
    assert {path.stem for path in ram.iterdir()} == {mine.stem, another.stem}
