"""Load things with transformers by `target.path`, and word the errors if that fails. Imports no torch."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import http_backoff, logging
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.errors import UserError, first_line
from eagle31_train.config import TargetConfig

MADE_HERE = {"SmolLM2-135M-Instruct": "embedded", "kimi-toy": "toy"}  # name in models/ → the module that makes it
ELSEWHERE = "use a local folder, or download the target where there is a network and set HF_HOME to that cache"
TRIES = 2  # retries, a second or two apart, before the hub counts as out of reach
NOT_WHOLE = "a file is truncated, or only a git-lfs pointer (`git lfs pull` fetches the file): copy it again"


def from_pretrained(kind: Any, target: TargetConfig, **options: Any) -> Any:
    """Load the target's `kind`, one of transformers' classes with from_pretrained. UserError if target.path holds none,
    or the target's code lacks a package or the permission to run."""
    where = {**source(target), "trust_remote_code": target.trust_remote_code}
    try:
        if Path(target.path).is_dir():
            foreign.check_folder(Path(target.path))
        return kind.from_pretrained(target.path, **where, **options)
    except Exception as error:  # libraries may raise anything for other people's files
        raise not_loaded(target, error) from None


def refuse_adapter(target: TargetConfig) -> None:
    """Raise UserError for a folder with a LoRA adapter, alone or beside a model."""
    where, folder = f"target.path={target.path}", Path(target.path)
    if not (folder / "adapter_config.json").is_file():
        return
    if (folder / "config.json").exists():  # transformers applies it if peft is installed; vLLM would not
        raise UserError(
            f"{where} holds a LoRA adapter beside a model, and vLLM would serve the model without it: merge them "
            "(peft's merge_and_unload), or move adapter_config.json elsewhere to use the model alone"
        )
    raise UserError(
        f"{where} is a LoRA adapter: set target.path to its base, whose drafter also serves the adapter, perhaps "
        "with fewer accepted drafts, or to the two merged (peft's merge_and_unload)"
    )


def load_tokenizer(target: TargetConfig) -> Any:
    """Load the target's tokenizer. UserError if there is none (transformers then makes one up of special tokens alone),
    or it does not encode and decode a word."""
    tokenizer = from_pretrained(AutoTokenizer, target)
    try:
        for special in (False, True):
            tokenizer.decode(tokenizer.encode("Hello", add_special_tokens=special))
        tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
        made_up = len(tokenizer) <= len(tokenizer.all_special_ids)
    except Exception as error:  # bad settings show only when the tokenizer is used
        raise not_loaded(target, error) from None
    if made_up:
        raise UserError(f"target.path={target.path} has no tokenizer files: copy tokenizer.json and the others there")
    return tokenizer


def source(target: TargetConfig) -> dict[str, Any]:
    """Return the options with which transformers finds files of target.path; for a hub id, the hub's cache alone if the
    hub is out of reach. UserError for a file, and for a missing folder before it is looked for on the hub."""
    if Path(target.path).is_file():
        raise UserError(f"target.path={target.path} is a file: set it to the file's folder")
    if not Path(target.path).exists() and target.path.startswith(("/", ".", "~", "models/")):
        maker = MADE_HERE.get(Path(target.path).name) if Path(target.path).parent.name == "models" else None
        remedy = f"`python -m eagle31_train.targets.{maker}` makes it" if maker else "set it to a folder or a hub id"
        raise UserError(f"target.path={target.path} does not exist: {remedy}")
    return {"revision": target.revision, **({"local_files_only": True} if out_of_reach(target) else {})}


def out_of_reach(target: TargetConfig) -> str | None:
    """Return why a hub id cannot be looked up; None if the hub answers at all, or target.path cannot be a hub id."""
    if Path(target.path).exists():
        return None
    try:
        url = hf_hub_url(target.path, "config.json")
    except ValueError:
        return None
    return _asked(url, constants.is_offline_mode())


@cache
def _asked(url: str, offline: bool) -> str | None:
    """Ask once, since transformers would ask for each file, and retry each for half a minute."""
    if offline:
        return "HF_HUB_OFFLINE is set"
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        http_backoff("HEAD", url, max_retries=TRIES, retry_on_status_codes=(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # raised by the HTTP client, which differs between versions
        return first_line(error)
    finally:
        logging.set_verbosity(verbosity)
    return None


def not_loaded(target: TargetConfig, error: Exception) -> UserError:
    """Return a one-line error: the target cannot be loaded, why, and what to do."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        half = "set target.dtype=float16, or evaluate.dtype in stage 4, or " if target.dtype == "float32" else ""
        advice = f"it does not fit: {half}use data.generate.server=vllm, extract.engine=vllm and evaluate.backend=vllm"
    elif isinstance(error, ImportError):
        advice = "it needs a package that is not installed: install that, or let vLLM run the target"
    elif "trust_remote_code" in str(error):
        advice = "it comes with its own Python code: review that, then allow it with target.trust_remote_code=true"
    elif isinstance(error, SafetensorError):  # its text names neither the file nor a remedy
        advice = NOT_WHOLE
    elif isinstance(error, OSError) and (why := out_of_reach(target)):
        return UserError(
            f"target.path={target.path}: there is no such folder, the hub cannot be reached ({why}), and its cache "
            f"lacks the target, or part of it: {ELSEWHERE}"
        )
    elif not Path(target.path).exists() and re.search(r"\bgated\b|\b40[13] Client Error", f"{error} {error.__cause__}"):
        advice = "check its name; request access on its page, then run `hf auth login` or set HF_TOKEN"
    else:
        here = "" if Path(target.path).exists() else "there is no such folder; "
        advice = f"{here}use a folder in transformers format, or a hub id"
    return UserError(f"target.path={target.path} cannot be loaded ({first_line(error)}): {advice}")


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of every token's spelling and id, the same in any version of transformers."""
    return artifacts.fingerprint(tokenizer.get_vocab())


def end_ids(tokenizer: PreTrainedTokenizerBase, target: TargetConfig) -> list[int]:
    """Return the ids at which the target stops: the tokenizer's, and those of generation_config.json or, without that
    file, of config.json. transformers and vLLM do the same."""
    ids = [tokenizer.eos_token_id]
    try:
        eos = _generation_end(target)
        ids += foreign.typed(list[foreign.Width | None], eos if isinstance(eos, list) else [eos])
    except Exception as error:
        raise not_loaded(target, error) from None
    return sorted({i for i in ids if i is not None})


def served_sampling(target: TargetConfig) -> dict[str, float]:
    """Return temperature, top_p and top_k as far as the target's generation_config.json sets them: they are a server's
    defaults. top_k 0: all tokens."""
    try:
        config: Any = GenerationConfig.from_pretrained(target.path, **source(target))
    except OSError:  # there is no such file
        return {}
    named: dict[str, Any] = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k")}
    return {name: max(0.0, value) for name, value in named.items() if isinstance(value, int | float)}


def _generation_end(target: TargetConfig) -> Any:
    generation: Any = GenerationConfig
    try:
        return generation.from_pretrained(target.path, **source(target)).eos_token_id
    except OSError:
        raw: dict[str, Any] = PretrainedConfig.get_config_dict(target.path, **source(target))[0]
        return raw.get("eos_token_id", (raw.get("text_config") or {}).get("eos_token_id"))
