"""Drafters on the Hugging Face Hub: downloads of published ones, uploads of exported ones."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from eagle31_train.common.errors import UserError, first_line
from eagle31_train.config import Config

# The hub's own errors are OSErrors or ValueErrors; the HTTP client's base error differs between hub versions.
ERRORS: tuple[type[BaseException], ...] = (OSError, ValueError, *HfHubHTTPError.__bases__)
WANTED = ["config.json", "*.safetensors", "*.safetensors.index.json"]
# Pictures of what was measured. An upload deletes those of earlier exports that this one lacks.
PICTURES = ["images/acceptance/*", "images/serving/*", "images/comparison-*"]
UPLOAD = "Upload the drafter"  # title of our commits, by which a card of ours is known


def fetch(repo: str, revision: str | None) -> Path:
    """Return the folder of a repository, from the hub or its cache, or raise UserError. Its name is the commit."""
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=WANTED))
    except ERRORS as error:
        advice = "check the name, the revision, the network and, for a private repository, HF_TOKEN"
        wrong = f"{repo} is not a folder here, and cannot be downloaded from the hub"
        raise UserError(f"{wrong} ({first_line(error)}): {advice}") from None


def check(config: Config) -> None:
    """Raise UserError, before hours of work, for a push=true that cannot work or whose upload nobody could serve."""
    if not config.push:
        return
    if "/" not in (config.repo or ""):
        raise UserError("push=true needs a hub repository: set repo=owner/name")
    try:
        validate_repo_id(config.repo)
    except HFValidationError as error:
        raise UserError(f"repo={config.repo} is not a valid hub repository ({error}): set repo=owner/name") from None
    if config.export_format == "speculators" and not config.target.is_hub_id:
        raise UserError("export_format=speculators would publish a local target.path: push with export_format=vllm")
    if config.export_format == "speculators" and config.target.revision:  # by which vLLM would read the drafter, too
        raise UserError("export_format=speculators cannot name target.revision: push with export_format=vllm")


def push(folder: Path, repo: str, private: bool, overwrite: bool = False) -> str:
    """Upload every file of `folder`, creating the repository if needed, and return its address. Pictures of an earlier
    export are removed; all other files stay. Raise UserError if the hub cannot be reached or refuses, if `private` is
    set and the repository is public, if it has weights in other files, as a sharded drafter has, or if its card is not
    the one that was uploaded last, unless `overwrite` allows replacing it."""
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private or None, exist_ok=True)
        # An existing repository keeps its visibility, whatever is passed to create_repo.
        if private and not api.model_info(repo).private:
            raise UserError(f"the hub repository {repo} is public: make it private there, or remove private=true")
        weights = (".safetensors", ".safetensors.index.json")
        there = {name for name in api.list_repo_files(repo) if name.endswith(weights) and "/" not in name}
        if others := sorted(there - {"model.safetensors"}):
            raise UserError(
                f"the hub repository {repo} has other weights ({', '.join(others[:3])}), which vLLM would load "
                "instead of these or after them: remove them there, or choose another repo"
            )
        (card,) = api.get_paths_info(repo, "README.md", expand=True) or (None,)
        if not overwrite and isinstance(card, RepoFile) and card.last_commit and card.last_commit.title != UPLOAD:
            raise UserError(
                f"the card (README.md) of the hub repository {repo} was edited there: move its text to a file of its "
                "own, or replace the card with overwrite=true"
            )
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=UPLOAD, delete_patterns=PICTURES)
    except UserError:
        raise
    except ERRORS as error:
        advice = "check repo=owner/name, the network, and that the token may write (`hf auth login`, or HF_TOKEN)"
        raise UserError(f"{folder} cannot be uploaded to {repo} ({error}): {advice}") from None
    return str(address)
