"""States that a GPU goes on after: copied behind their step, and written by a thread."""

import pytest
import torch
from targets.test_vllm_states import write_all, written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_each_conversation_gets_its_rows_though_the_next_step_writes_over_them(tmp_path):
    write_all(tmp_path, "cuda")
    written(tmp_path)
