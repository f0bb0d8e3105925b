"""States that a GPU goes on after: copied behind their step, and written by a thread."""

from targets.test_vllm_states import write_all, written


def test_each_conversation_gets_its_rows_though_the_next_step_writes_over_them(tmp_path):
    write_all(tmp_path, "cuda")
    written(tmp_path)
