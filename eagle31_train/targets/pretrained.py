"""What transformers loads by `target.path`: how, and what is said where it cannot. Imports no torch."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from eagle31_train import artifacts, foreign
from eagle31_train.config import TargetConfig
from eagle31_train.errors import UserError, first_line

EMBEDDED = "the embedded target is made by `python -m eagle31_train.targets.embedded`"
NOT_WHOLE = "a file is cut short, or only git-lfs's pointer to one (`git lfs pull` fetches them): copy it again"


def from_pretrained(kind: Any, target: TargetConfig, **options: Any) -> Any:
    """`kind`, one of transformers' classes that load by a name, as the target has it; UserError if there is none at
    target.path, or its code lacks a package or the permission to run."""
    require_path(target)
    where = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    try:
        if Path(target.path).is_dir():
            foreign.check_folder(Path(target.path))
        return kind.from_pretrained(target.path, **where, **options)
    except Exception as error:  # of files that others made, in which libraries stumble over anything
        raise not_loaded(target, error) from None


def load_tokenizer(target: TargetConfig) -> Any:
    """The target's tokenizer; UserError if there is none, or it does not encode and decode a word."""
    tokenizer = from_pretrained(AutoTokenizer, target)
    try:
        for special in (False, True):
            tokenizer.decode(tokenizer.encode("Hello", add_special_tokens=special))
        tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
    except Exception as error:  # settings that nobody looked at until now
        raise not_loaded(target, error) from None
    return tokenizer


def require_path(target: TargetConfig) -> None:
    """Refuse a folder that is not there, before it is looked for on the hub."""
    if not Path(target.path).exists() and target.path.startswith(("/", ".", "~", "models/")):
        remedy = EMBEDDED if target.path.startswith("models/") else "give a folder (~ is not read), or a hub id"
        raise UserError(f"target.path={target.path} does not exist: {remedy}")


def not_loaded(target: TargetConfig, error: Exception) -> UserError:
    """That a target cannot be loaded, why, and what to do, in one line."""
    if isinstance(error, ImportError):
        advice = "its code needs a package that is not here: install it, tiktoken for Kimi"
    elif "trust_remote_code" in str(error):
        advice = "it comes with Python code of its own: read it, and allow it to run with target.trust_remote_code=true"
    elif isinstance(error, SafetensorError):  # which tells neither the file nor what to do
        advice = NOT_WHOLE
    else:
        here = "" if Path(target.path).exists() else "there is no such folder here; "
        advice = f"{here}give a folder in transformers format, or a hub id"
    return UserError(f"target.path={target.path} cannot be loaded ({first_line(error)}): {advice}")


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """What tells two vocabularies apart, in any version of transformers: every token's spelling and id."""
    return artifacts.fingerprint(tokenizer.get_vocab())


def end_ids(tokenizer: PreTrainedTokenizerBase, target: TargetConfig) -> list[int]:
    """The ids at which the target stops: the tokenizer's and those of generation_config.json."""
    ids = [tokenizer.eos_token_id]
    try:
        generation: Any = GenerationConfig
        eos = generation.from_pretrained(target.path, revision=target.revision).eos_token_id
        ids += foreign.typed(list[foreign.Width | None], eos if isinstance(eos, list) else [eos])
    except OSError:  # a target without generation_config.json: the tokenizer alone says it
        pass
    except Exception as error:
        raise not_loaded(target, error) from None
    return sorted({i for i in ids if i is not None})
