"""Upload of a finished run to the Hugging Face hub.

What stock tools load goes up (model or adapter, tokenizer, card, report); checkpoints, tracker
files and optimizer states do not. The token is the one of `hf auth login`, or HF_TOKEN; nothing
here reads or prints it.

Knows: huggingface_hub. Does not know: training.
"""

from __future__ import annotations

from pathlib import Path

from headrace.errors import TrainingError

LEFT_OUT = ("checkpoint-*/*", ".checkpoint-*/*", "runs/*", "wandb/*", "*.tmp", "log.jsonl")


def push(folder: Path, repo_id: str, *, private: bool | None, message: str) -> str:
    """Create the repository when it is not there, upload in one commit; returns its address.

    Raises TrainingError with what the hub said; the files on disk stay as they are.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=list(LEFT_OUT),
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise TrainingError(
            f"upload to {repo_id} failed: {str(error).strip().splitlines()[0]}. The model is whole "
            f"in {folder}; log in with `hf auth login`, then `hf upload {repo_id} {folder}`."
        ) from error
    return str(created)
