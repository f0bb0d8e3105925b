"""A target's tokenizer, for the stages that meet in its token ids: how it is loaded, and which words its ids are."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle31_train import artifacts
from eagle31_train.schema import TargetConfig, UserError


def from_pretrained(kind: Any, target: TargetConfig) -> Any:
    """`kind`, one of transformers' classes that load by a name, as the target has it.

    Raises:
        UserError: there is none at target.path, or its code lacks a package or the permission to run.
    """
    try:
        return kind.from_pretrained(target.path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    except ImportError as error:
        raise UserError(
            f"the code that comes with target.path={target.path} needs something that is not here "
            f"({str(error).strip().splitlines()[0]}): install it, tiktoken for Kimi"
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if "trust_remote_code" in str(error):
            raise UserError(
                f"target.path={target.path} comes with Python code of its own: read it, and allow it to run with "
                "target.trust_remote_code=true"
            ) from None
        raise UserError(
            f"target.path={target.path} cannot be loaded ({reason}): give a directory in transformers format "
            "or a hub id; the embedded target is made by `python -m eagle31_train.targets.embedded`"
        ) from None


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """What tells two vocabularies apart: every token's spelling and id.

    Unlike the text in which a tokenizer is saved, no version of transformers alters it, and stages may run in
    different environments.
    """
    return artifacts.fingerprint(tokenizer.get_vocab())
