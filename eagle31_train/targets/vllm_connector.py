"""How vLLM hands hidden states over: one file per request, on a CPU too.

vLLM loads this class by its name and module (`kv_connector_module_path`) into its workers; nothing
else of the project runs there. vLLM's own connector copies states through pinned memory and a CUDA
stream of its own; where there is no CUDA the same file is written plainly, before the step ends.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """vLLM's connector, working on a CPU too. A file is whole once the lock beside it is free."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero or self._kv_cache is None:
            return
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        # A block's number and the place in it: where each token's states lie, in the order of tokens.
        slots = torch.arange(len(pending.block_ids) * self._block_size)
        slots = torch.tensor(pending.block_ids)[slots // self._block_size] * self._block_size + slots % self._block_size
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, pending.filename)
        finally:
            if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
                os.close(lock)  # which frees it
        self._req_copy_events[pending.req_id] = _Done()


class _Done:
    """Stands for the CUDA event of a copy that is over."""

    def query(self) -> bool:
        return True
