"""vLLM as the engine: tensor parallelism, quantized targets, targets too large for transformers.

Our worker (`vllm_worker.py`) writes each conversation's states to a file, which is read here and removed at once.
The engine runs in this process, where its batches depend on the requests alone: a repeated run gives the same bits.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.common.console import ranks
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.targets.description import kinds, pick_layers, read_raw
from eagle31_train.targets.hf import DTYPES, Reference, check_length, pick_device, positions
from eagle31_train.targets.pretrained import out_of_reach
from eagle31_train.targets.readout import checkpoint_folder, readout_from_checkpoint
from eagle31_train.targets.vllm_states import CANNOT, LAYERS, number

# In one process, vLLM's schedule depends on the requests alone.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Of vLLM's two model runners, use the one that also runs on a CPU: tests there then cover what a GPU does.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
# A process in which torch's threads have run must not be forked into workers.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

TOP = 20  # tokens whose probabilities the gate asks for
# Arguments that the engine sets itself: from target.*, and to get whole states that are the same every time.
OURS = {"model", "revision", "dtype", "trust_remote_code", "speculative_config", "kv_transfer_config", "worker_cls"}
OURS |= {"enable_prefix_caching", "async_scheduling"}
OURS |= {"pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"}
RAM_DISK = Path("/dev/shm")
FOLDER = "eagle31-states"
DISK = "free some space, point TMPDIR elsewhere, or lower extract.shard_tokens"
MEMORY = "lower gpu_memory_utilization or max_num_batched_tokens in extract.engine_args"


class VllmEngine:
    """vLLM in this process; UserError if it does not start with this target and these arguments."""

    name = "vllm"

    def __init__(self, config: Config) -> None:
        if ranks() > 1:
            raise UserError("extract.engine=vllm uses all devices itself: start one process per machine (extract.part)")
        for name in OURS & config.extract.engine_args.keys():
            raise UserError(f"extract.engine_args.{name} cannot be set, as eagle31 sets it itself: remove it")
        self.readout = readout_from_checkpoint(config.target, DTYPES[config.target.dtype])
        self.layers = pick_layers(config.target.aux_layers, self.readout.depth, kinds(read_raw(config.target)))
        if self.layers[0] == 0 and config.extract.engine_args.get("enforce_eager") and torch.cuda.is_available():
            advice = "remove extract.engine_args.enforce_eager"
            raise UserError(f"target.aux_layers={self.layers}: vLLM overwrites the input of layer 0: {advice}")
        # vLLM returns each layer once, in ascending order; the input of layer N is the last hidden state.
        self._taken = sorted({*self.layers, self.readout.depth})
        row = len(self._taken) * self.readout.embedding.shape[1] * self.readout.embedding.itemsize
        self._folder = states_folder(2 * row * max(config.extract.shard_tokens, config.data.max_length))
        self._llm = _start(config, self._taken)
        self._llm.collective_rpc("open_states", args=(str(self._folder),))
        self.longest: int | None = self._llm.model_config.max_model_len - 1  # one token is generated
        self.readout = self.readout.to(pick_device(config.target.device))

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Engine.run`. The states are on the readout's device, where they are also encoded."""
        device = self.readout.head.device
        rows = torch.tensor([self._taken.index(layer) for layer in self.layers], device=device)
        for index, _, read in self._answers(tokens):
            if read["token_ids"].tolist() != tokens[index].tolist():
                raise RuntimeError("vLLM gave the states of other tokens than it was asked for")
            states = read["hidden_states"].to(device)
            yield index, states[rows].transpose(0, 1), states[self._taken.index(self.readout.depth)]

    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """See `Engine.reference`: log-probabilities of the TOP likeliest tokens, by vLLM's own norm and lm_head."""
        [(_, output, _)] = self._answers([tokens], prompt_logprobs=TOP)
        # Entry p + 1 has the distribution after token p. Besides the likeliest tokens it holds the actual one.
        rows = [output.prompt_logprobs[p + 1] for p in positions.tolist()]
        likeliest = [sorted(row.items(), key=lambda one: one[1].rank)[:TOP] for row in rows]
        ids = torch.tensor([[token for token, _ in row] for row in likeliest])
        return Reference(torch.tensor([[one.logprob for _, one in row] for row in likeliest]), ids)

    def _answers(self, tokens: Sequence[Tensor], **more: Any) -> Iterator[tuple[int, Any, dict[str, Tensor]]]:
        """Yield, as they finish, each conversation's index, vLLM's output, and the content of its file."""
        from vllm import SamplingParams

        check_length(self, max((len(row) for row in tokens), default=0))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **more)
        try:
            prompts = [{"prompt_token_ids": row.tolist()} for row in tokens]
            asked = self._llm.enqueue(prompts, sampling, use_tqdm=False)
        except ValueError as error:
            raise UserError(f"vLLM refuses a conversation ({error}): check extract.engine_args") from None
        which = {number(request): index for index, request in enumerate(asked)}
        engine, finished = self._llm.llm_engine, list[Any]()
        while finished or engine.has_unfinished_requests():
            running = engine.has_unfinished_requests()
            try:
                if running:
                    finished += [output for output in engine.step() if output.finished]
                else:
                    self._llm.collective_rpc("flush_states")
            except RuntimeError as error:  # from a worker in another process, only the text arrives
                if CANNOT in str(error):
                    raise UserError(f"vLLM: {error} ({self._folder}): {DISK}") from None
                if "out of memory" in str(error):
                    raise UserError(f"vLLM: {error}: {MEMORY}") from None
                raise
            # On a GPU a file is written while the next steps run.
            there = [output for output in finished if self._file(output).exists()]
            if not there and not running:
                raise RuntimeError(f"vLLM finished {len(finished)} conversations, but wrote no states of them")
            for output in there:
                finished.remove(output)
                file = self._file(output)
                read = load_file(file)
                file.unlink()
                yield which[number(output.request_id)], output, read

    def _file(self, output: Any) -> Path:
        return self._folder / f"{number(output.request_id)}.safetensors"


def _start(config: Config, layers: list[int]) -> Any:
    """Start a vLLM engine that hands out the inputs of `layers`."""
    from vllm import LLM
    from vllm.transformers_utils.config import get_config

    target, wanted = config.target, config.extract.engine_args
    # If the hub is out of reach, vLLM would retry for minutes and give up; the cache has the whole target.
    path = str(checkpoint_folder(target)) if out_of_reach(target) else target.path
    arguments: dict[str, Any] = {
        "model": path,
        "revision": target.revision,
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "enable_prefix_caching": False,
        "max_logprobs": TOP,
        "seed": config.seed,
        "async_scheduling": False,
        "language_model_only": True,  # reserves no memory for a multimodal target's images
        "worker_cls": "eagle31_train.targets.vllm_worker.StatesWorker",
    }
    # In additional_config, the layers are part of the key under which vLLM caches a compiled model.
    more = {"additional_config": {**wanted.get("additional_config", {}), LAYERS: layers}}
    try:
        # No more than the data needs: vLLM reserves memory for a conversation of the greatest length.
        # Use vLLM's own configuration reader: it knows more kinds than transformers.
        read = get_config(path, target.trust_remote_code, revision=target.revision)
        arguments["max_model_len"] = min(config.data.max_length + 1, positions(read) or float("inf"))
        return LLM(**{**arguments, **wanted, **more})
    except Exception as error:  # vLLM and its libraries may raise anything for a target or arguments
        what = f"target.path={target.path} and extract.engine_args={wanted}"
        raise UserError(f"vLLM cannot start with {what}: {error}") from error


def states_folder(size: int) -> Path:
    """Make a temporary folder with `size` bytes free, in memory if possible; it is removed when this process ends."""
    for parent in (RAM_DISK, Path(tempfile.gettempdir())):
        if parent.is_dir():
            _sweep(parent)
            if shutil.disk_usage(parent).free >= size:
                folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}-", dir=parent))
                fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # as long as this process lives
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                return folder
    folders = f"neither {RAM_DISK} nor {tempfile.gettempdir()}"
    raise UserError(f"{folders} has {size / 1e9:.1f} GB free, for the states of a shard from vLLM: {DISK}")


def _sweep(parent: Path) -> None:
    """Remove the folders of killed processes, whose locks nobody holds any more."""
    for folder in parent.glob(f"{FOLDER}-*"):
        with suppress(OSError):  # held, somebody else's, or just swept by another process
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
