"""vLLM as the engine: tensor parallelism, quantized targets, targets too large for transformers.

vLLM's speculative method `extract_hidden_states` drafts nothing: it keeps the hidden states of the
wanted layers in cache blocks of their own, and a connector (`vllm_connector.py`) writes each finished
request's to a file, which is read here and removed at once. The engine runs in this process, where
what it batches together depends on nothing but the requests: a run repeated gives the same bits.

Shapes: T tokens of one conversation; A auxiliary layers; H hidden.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.schema import Config, UserError
from eagle31_train.targets.engine import Reference, too_long
from eagle31_train.targets.hf import pick_device, pick_dtype, pick_layers, ranks, require_path
from eagle31_train.targets.readout import readout_from_checkpoint

# In one process vLLM schedules by the requests alone; the rest spares users its chatter.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

TOP = 20  # tokens whose probabilities the gate asks for
OURS = {  # arguments that the engine sets itself
    "model": "it is target.path",
    "revision": "it is target.revision",
    "dtype": "it is target.dtype",
    "trust_remote_code": "it is target.trust_remote_code",
    "speculative_config": "the layers are target.aux_layers",
    "kv_transfer_config": "it is how the states come out",
    "enable_prefix_caching": "conversations share no states, so that each one's are whole",
}
RAM_DISK = Path("/dev/shm")
FOLDER = "eagle31-states"
ROOM = "free some, point TMPDIR elsewhere, or lower extract.shard_tokens"


class VllmEngine:
    """vLLM in this process.

    Raises:
        UserError: vLLM does not start with this target and these arguments.
    """

    name = "vllm"

    def __init__(self, config: Config) -> None:
        if ranks() > 1:
            raise UserError(
                "extract.engine=vllm spreads over devices itself: start one process, with "
                "extract.engine_args.tensor_parallel_size=… (or data on several machines)"
            )
        for name in OURS.keys() & config.extract.engine_args.keys():
            raise UserError(f"extract.engine_args.{name} cannot be set: {OURS[name]}")
        require_path(config.target)
        self.readout = readout_from_checkpoint(config.target, pick_dtype(config.target.dtype))
        self.layers = pick_layers(config.target.aux_layers, self.readout.depth)
        # vLLM gives each layer once, in ascending order; the input of layer N is the last hidden state.
        self._taken = sorted({*self.layers, self.readout.depth})
        row = len(self._taken) * self.readout.embedding.shape[1] * self.readout.embedding.itemsize
        self._folder = states_folder(2 * row * max(config.extract.shard_tokens, config.data.max_length))
        self._llm = _start(config, self._taken, self._folder)
        self.longest: int | None
        self.longest, self.longer = bound(self._llm.model_config)
        self.readout = self.readout.to(pick_device(config.target.device))

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Engine.run`; states are where the readout is, which encodes them, too."""
        device = self.readout.head.device
        columns = torch.tensor([self._taken.index(layer) for layer in self.layers], device=device)
        for index, _, read in self._answers(tokens):
            if read["token_ids"].tolist() != tokens[index].tolist():
                raise RuntimeError("vLLM gave the states of other tokens than it was asked for")
            states = read["hidden_states"].to(device)
            yield index, states[:, columns], states[:, self._taken.index(self.readout.depth)]

    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """See `Engine.reference`: log-probabilities of the TOP likeliest tokens, by vLLM's own norm and lm_head."""
        [(_, output, _)] = self._answers([tokens], prompt_logprobs=TOP)
        # Entry p + 1 is of the distribution after token p. Besides the likeliest it holds the token that came.
        rows = [output.prompt_logprobs[p + 1] for p in positions.tolist()]
        likeliest = [sorted(row.items(), key=lambda one: one[1].rank)[:TOP] for row in rows]
        ids = torch.tensor([[token for token, _ in row] for row in likeliest])
        return Reference(torch.tensor([[one.logprob for _, one in row] for row in likeliest]), ids)

    def _answers(self, tokens: Sequence[Tensor], **more: Any) -> Iterator[tuple[int, Any, dict[str, Tensor]]]:
        """As they come: which of the conversations, vLLM's output, and the file that belongs to it."""
        from vllm import SamplingParams

        longest = max((len(row) for row in tokens), default=0)
        if self.longest is not None and longest > self.longest:
            raise too_long(self, longest)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **more)
        try:
            prompts = [{"prompt_token_ids": row.tolist()} for row in tokens]
            asked = self._llm.enqueue(prompts, sampling, use_tqdm=False)
        except ValueError as error:
            raise UserError(f"vLLM refuses a conversation: {_one_line(error)}; see extract.engine_args") from None
        which = {_number(request): index for index, request in enumerate(asked)}
        engine, finished = self._llm.llm_engine, list[Any]()
        # A file is written in the step after its request's last one, or (on a GPU) meanwhile by a thread.
        while engine.has_unfinished_requests() or finished:
            try:
                finished += [output for output in engine.step() if output.finished]
            except SafetensorError as error:
                raise UserError(f"vLLM cannot write to {self._folder}: {_one_line(error)}; {ROOM}") from None
            whole = [(output, read) for output in finished if (read := self._take(output)) is not None]
            for output, read in whole:
                finished.remove(output)
                yield which[_number(output.request_id)], output, read
            if not whole and not engine.has_unfinished_requests():
                time.sleep(0.001)

    def _take(self, output: Any) -> dict[str, Tensor] | None:
        """Read a request's file and remove it; None if it is not whole yet, which its lock tells."""
        file = self._folder / Path(output.kv_transfer_params["hidden_states_path"]).name
        lock = file.with_name(f"{file.name}.lock")
        with lock.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
        try:
            read = load_file(file)
        except (FileNotFoundError, SafetensorError) as error:
            raise UserError(f"vLLM did not write {file} whole ({_one_line(error)}): {ROOM}") from None
        file.unlink()
        lock.unlink()
        return read


def _start(config: Config, layers: list[int], folder: Path) -> Any:
    """The vLLM engine, set to give the inputs of `layers` in files under `folder`."""
    wanted = dict(config.extract.engine_args)
    from transformers import AutoConfig
    from vllm import LLM

    # No more than the data needs: vLLM keeps room for a conversation of the greatest length.
    trust = {"trust_remote_code": config.target.trust_remote_code}
    model = AutoConfig.from_pretrained(config.target.path, revision=config.target.revision, **trust).get_text_config()
    limit = getattr(model, "max_position_embeddings", None) or config.data.max_length + 1
    arguments: dict[str, Any] = {
        "model": config.target.path,
        "revision": config.target.revision,
        "dtype": config.target.dtype,
        "max_model_len": min(config.data.max_length + 1, limit),
        **trust,
        "enable_prefix_caching": False,
        "max_logprobs": TOP,
        "seed": config.seed,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "eagle31_train.targets.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }
    try:
        return LLM(**{**arguments, **wanted})
    except (ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError, OSError) as error:
        raise UserError(
            f"vLLM does not start with target.path={config.target.path} and extract.engine_args={wanted}: "
            f"{_one_line(error)}"
        ) from error


def bound(model_config: Any) -> tuple[int, str]:
    """The longest conversation that vLLM takes, given its configuration of the model, and how to go beyond."""
    longest = model_config.max_model_len - 1  # one token is generated
    cut = f"cut the data by data.max_length={longest}"
    try:
        model_config.get_and_verify_max_len(longest + 2)
    except ValueError:
        return longest, f"{cut} (the target itself has no more positions)"
    return longest, f"set extract.engine_args.max_model_len to one more than it has, or {cut}"


def states_folder(room: int) -> Path:
    """A temporary folder with room for so many bytes, gone when this process ends; in memory if possible."""
    for place in (RAM_DISK, Path(tempfile.gettempdir())):
        if place.is_dir():
            _sweep(place)
            if shutil.disk_usage(place).free >= room:
                return _claim(Path(tempfile.mkdtemp(prefix=f"{FOLDER}-", dir=place)))
    raise UserError(
        f"neither {RAM_DISK} nor {tempfile.gettempdir()} has {room / 1e9:.1f} GB of room for vLLM to hand over "
        f"the states of a shard: {ROOM}"
    )


def _claim(folder: Path) -> Path:
    """Hold a lock beside the folder as long as this process lives, and remove both when it ends."""
    lock = folder.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    atexit.register(_discard, folder, lock)
    return folder


def _discard(folder: Path, lock: IO[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    Path(lock.name).unlink(missing_ok=True)
    lock.close()


def _sweep(place: Path) -> None:
    """Remove the folders of processes that were killed: nobody holds their locks any more."""
    for name in place.glob(f"{FOLDER}-*.lock"):
        with suppress(OSError), name.open() as lock:  # held, somebody else's, or just swept by another process
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(name.with_suffix(""), ignore_errors=True)
            name.unlink(missing_ok=True)


def _number(request: str) -> str:
    """vLLM numbers requests, and may put random letters behind."""
    return request.partition("-")[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
