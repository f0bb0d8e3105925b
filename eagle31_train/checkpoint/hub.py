"""Drafters on the Hugging Face Hub: downloads of published ones, uploads of exported ones."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from eagle31_train.errors import UserError

# The HTTP client's own base error and OSError; the client's package differs between hub versions.
_NETWORK_ERRORS: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
WANTED = ["config.json", "*.safetensors", "*.safetensors.index.json"]
# Pictures of what was measured: those that an earlier export uploaded and this one lacks leave the repository.
PICTURES = ["images/acceptance/*", "images/serving/*", "images/comparison-*"]


def fetch(repo: str, revision: str | None) -> Path:
    """The folder of a repository of the hub, downloaded or found in the hub's cache; its name is the commit.

    Raises:
        UserError: there is no such repository or revision, or the hub cannot be reached and the cache lacks it.
    """
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=WANTED))
    except RevisionNotFoundError:
        raise UserError(f"the hub repository {repo} has no revision {revision or 'main'}") from None
    except GatedRepoError:
        raise UserError(f"the hub repository {repo} is gated: accept its terms there, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{repo} is no folder here, and no repository of the hub either, or a private one: check the name, "
            "or set HF_TOKEN"
        ) from None
    except (OSError, ValueError) as error:  # no network, HF_HUB_OFFLINE, a full disk
        raise UserError(
            f"{repo} is no folder here, and cannot be had from the hub ({_line(error)}): check the name, the network "
            "and HF_HUB_OFFLINE, or give a folder"
        ) from None


def push(folder: Path, repo: str, private: bool) -> str:
    """Make the repository where there is none, and upload every file of `folder`; returns its address.

    Pictures of an earlier export are removed; whatever else is there stays.

    Raises:
        UserError: the hub cannot be reached or refuses, a file cannot be read, or `private` is asked of a
            repository that is public already (nothing is uploaded then).
    """
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private or None, exist_ok=True)
        # An existing repository keeps its visibility, whatever create_repo was told.
        if private and not api.model_info(repo).private:
            raise UserError(
                f"the hub repository {repo} exists and is public: make it private there, or leave out private=true"
            )
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload the drafter", delete_patterns=PICTURES
        )
    except HFValidationError as error:
        raise UserError(f"repo={repo} is no hub repository name ({_line(error)}): use repo=owner/name") from None
    except LocalTokenNotFoundError:
        raise UserError("push=true needs a hub token: run `hf auth login`, or set HF_TOKEN") from None
    except OfflineModeIsEnabled:
        raise UserError("push=true needs the network, but HF_HUB_OFFLINE is set: unset it") from None
    except HfHubHTTPError as error:
        raise UserError(_refusal(error, repo)) from None
    except _NETWORK_ERRORS as error:
        if isinstance(error, OSError) and error.filename:  # which a network's errors lack
            raise UserError(f"{error.filename} cannot be uploaded ({error.strerror}): mend it and run again") from None
        raise UserError(f"the hub cannot be reached ({_line(error)}): check the network and HF_ENDPOINT") from None
    return str(address)


def _refusal(error: HfHubHTTPError, repo: str) -> str:
    status = error.response.status_code if error.response is not None else None
    if status == 401:
        return "the hub refused the token: run `hf auth login`, or set HF_TOKEN to a valid one"
    if status == 403:
        return f"the hub token may not write to {repo}: use one with write access, or another repo=owner/name"
    # Too many requests, and the hub's own failures, pass; what else it refuses, it refuses again.
    passing = status is None or status in (408, 429) or status >= 500
    what = "run the same command again later" if passing else "is the owner's name right, and may it have this?"
    return f"the hub answered {status} for {repo} ({_line(error)}): {what}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
