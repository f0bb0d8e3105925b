"""A vLLM server for the answers alone, `data.generate.server=vllm`. It starts when the first answer is asked for and
ends after the last, so that later stages have its devices."""

from contextlib import ExitStack
from pathlib import Path

from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config

LOG = "answers-vllm.log"  # in the run's folder


class OwnServer(ExitStack):
    """A server of the target on loopback, started by the first `url()` and ended with the `with` block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self._url = config, ""
        if config.data.generate.model:
            raise UserError(
                "data.generate.model is only for a server of yours, but data.generate.server=vllm starts one: remove it"
            )

    def url(self) -> str:
        """Return its address; UserError if vLLM does not start."""
        if not self._url:
            # Both load torch and transformers, which takes seconds: a stage that is up to date does without.
            import torch

            from eagle31_train.evaluation.serving.engine import answering_arguments, flags
            from eagle31_train.evaluation.serving.server import MODULE, pick_port, serving
            from eagle31_train.targets.pretrained import out_of_reach

            python, port, log = self.config.evaluate.vllm_python, pick_port(), Path(self.config.run_dir) / LOG
            arguments = answering_arguments(self.config, torch.cuda.device_count(), port)
            command = [python, "-m", MODULE, *flags(arguments)]
            note(f"answers: starting vLLM (log: {log})")
            offline = out_of_reach(self.config.target) is not None
            try:
                self._server = self.enter_context(serving(command, port, log, offline=offline))
            except (UserError, OSError) as error:
                raise UserError(f"{error}; vLLM was started with evaluate.vllm_python={python}") from None
            self._url = f"http://127.0.0.1:{port}/v1"
        return self._url

    def check(self, dying: bool) -> None:
        """UserError with its last output if it has ended; `dying`: give it time to end first."""
        self._server.check(dying)
