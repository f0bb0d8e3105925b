"""A vLLM worker that hands out the hidden states which a draft model would get.

vLLM loads the class by its name (`worker_cls`) into each of its processes. The target's own auxiliary outputs
(`SupportsEagle3`) are switched on before it is profiled, compiled or captured in CUDA graphs. They are read after each
step, where a draft would get them, so the states are those of serving. vLLM's method `extract_hidden_states` would keep
them in a separate KV cache group, which is not possible beside the compressed cache of MLA (DeepSeek, Kimi).
"""

from pathlib import Path
from typing import Any

from vllm.config import CompilationMode
from vllm.model_executor.models.interfaces import EagleModelMixin, supports_eagle3
from vllm.platforms import current_platform

from eagle31_train.targets.vllm_states import LAYERS, Piece, StatesWriter, number

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

WITHOUT_0 = "remove 0 from target.aux_layers"


class StatesWorker(PlatformWorker):
    """A worker that, on rank 0, writes the states to files; see `vllm_states.py`."""

    _states: StatesWriter | None = None

    def load_model(self, **options: Any) -> None:
        """Load the target with its auxiliary outputs on; ValueError if vLLM's class has none, or none of layer 0."""
        super().load_model(**options)
        model = self.model_runner.get_model()
        layers = self.vllm_config.additional_config[LAYERS]
        if not supports_eagle3(model):
            raise ValueError(f"vLLM's {type(model).__name__} provides no auxiliary hidden states (SupportsEagle3)")
        # DeepSeek's classes add a residual, and before layer 0 there is none.
        if 0 in layers and not any(isinstance(module, EagleModelMixin) for module in model.modules()):
            raise ValueError(f"vLLM's {type(model).__name__} does not provide the input of layer 0: {WITHOUT_0}")
        compiled = self.vllm_config.compilation_config.mode == CompilationMode.VLLM_COMPILE
        if 0 in layers and not (compiled or current_platform.is_cpu()):
            raise ValueError(f"vLLM overwrites the input of layer 0 unless it compiles the target: {WITHOUT_0}")
        model.set_aux_hidden_state_layers(tuple(layers))
        self.model_runner.use_aux_hidden_state_outputs = True

    def open_states(self, folder: str) -> None:
        if self.rank == 0:  # after tensor parallelism's all-reduce every rank has the same states
            self._states = StatesWriter(Path(folder))

    def flush_states(self) -> None:
        if self._states is not None:
            self._states.flush()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, then pass its states to the writer."""
        result = super().execute_model(scheduler_output)
        # Between the two halves of a step, forward pass and sampling, the runner keeps what a draft needs.
        step = self.model_runner.execute_model_state
        if self._states is not None and step is not None:
            tokens = self.model_runner.input_ids.gpu  # as the forward pass read them: they prove whose rows these are
            self._states.add(step.aux_hidden_states, tokens, self._pieces(step.scheduler_output))
        return result

    def _pieces(self, scheduled: Any) -> list[Piece]:
        """Return which rows of the step's batch belong to which conversation, in batch order."""
        batch = self.model_runner.input_batch
        return [
            Piece(
                number(request),
                int(batch.num_computed_tokens_cpu[row]),
                scheduled.num_scheduled_tokens[request],
                int(batch.num_prompt_tokens[row]),
            )
            for row, request in enumerate(batch.req_ids)
        ]
