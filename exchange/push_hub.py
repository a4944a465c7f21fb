"""Upload an exported folder to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError, UserError
from exchange.extras import require_package

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HUB = "https://huggingface.co"
TOKENS_PAGE = f"{HUB}/settings/tokens"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
NO_TOKEN = (
    f"There is no Hugging Face token: set HF_TOKEN to one that may write ({TOKENS_PAGE}); in Colab, add it as the "
    'secret HF_TOKEN and run `import os; from google.colab import userdata; os.environ["HF_TOKEN"] = '
    'userdata.get("HF_TOKEN")` in a cell first.'
)


@dataclass(frozen=True)
class Pushed:
    """Where the files are now, and who may see them."""

    url: str
    private: bool

    def __str__(self) -> str:
        return f"{self.url} ({'private' if self.private else 'public'})"


def push(folder: str | Path, repo_id: str, public: bool = False) -> Pushed:
    """Upload every file of `folder` to the model repository `repo_id`, "user/name". A missing repository is created:
    private, unless `public`. Files of the same names are replaced, others stay.

    The token comes from HF_TOKEN or HUGGING_FACE_HUB_TOKEN, from `hf auth login`, or in Colab from the secret HF_TOKEN.
    It is never shown. Raises UserError, in a sentence, if the upload fails, or if the repository is public and `public`
    is not set.
    """
    require_push(repo_id)
    if not Path(folder).is_dir():
        raise ConfigError(f"There is no folder {folder} to upload.")
    import huggingface_hub

    api = huggingface_hub.HfApi(endpoint=endpoint(), token=find_token())
    try:
        return upload(api, Path(folder), repo_id, public)
    except UserError:
        raise
    except Exception as problem:  # of httpx, httpx2 or requests, depending on the version of huggingface_hub
        message = explain(problem, repo_id)
    # Raised outside of `except`: no traceback may lead to a request, whose headers hold the token.
    raise UserError(message.replace(str(api.token), "..."))


def require_push(repo_id: str) -> None:
    """Raises ConfigError or UserError for what can be checked before exporting: a malformed name, a missing package, a
    missing token."""
    if not REPO_ID.fullmatch(repo_id):
        raise ConfigError(f"{repo_id!r} is no repository of the Hugging Face Hub; write it as USER/NAME.")
    require_package("huggingface_hub", "Uploading")
    find_token()


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def find_token() -> str:
    """Raises UserError if there is none, or if it is malformed."""
    import huggingface_hub

    token = huggingface_hub.get_token()
    if not token:
        raise UserError(NO_TOKEN)
    if not re.fullmatch(r"[!-~]+", token):  # a request with it would fail with the token in the message
        raise UserError(f"The Hugging Face token has characters that no token has; copy it anew from {TOKENS_PAGE}")
    return token


def upload(api: HfApi, folder: Path, repo_id: str, public: bool) -> Pushed:
    url = api.create_repo(repo_id, private=not public, exist_ok=True)
    private = bool(api.model_info(repo_id).private)
    if not private and not public:
        raise UserError(f"{url} is public and --public was not given; add it, or name another repository.")
    api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload the exported model")
    return Pushed(str(url), private)


def explain(problem: BaseException, repo_id: str) -> str:
    """A sentence on why the upload failed."""
    chain = list(causes(problem))
    answers = [answer for error in chain if (answer := getattr(error, "response", None)) is not None]
    status = getattr(answers[0], "status_code", None) if answers else None
    owner = repo_id.partition("/")[0]
    if status == 401:
        return f"The Hugging Face Hub does not accept the token (401); make one that may write at {TOKENS_PAGE}"
    if status == 403:
        return (
            f"The Hugging Face Hub does not let this token write to {repo_id} (403); make one that may at "
            f"{TOKENS_PAGE}, or name a repository of your own instead of {owner}'s."
        )
    if status == 404:
        return f"The Hugging Face Hub knows no user or organization {owner}, or hides it from this token (404)."
    reason = " ".join(str(chain[-1] if status is None else problem).split())[:300] or type(problem).__name__
    if status is not None:
        return f"The Hugging Face Hub refused the upload to {repo_id} ({status}): {reason}"
    if any(isinstance(error, OSError) or "http" in type(error).__module__ for error in chain):
        return f"The Hugging Face Hub at {endpoint()} cannot be reached ({reason}); try again when it can."
    return f"The upload to {repo_id} failed: {type(problem).__name__}: {reason}"


def causes(problem: BaseException | None) -> Iterator[BaseException]:
    """The exception, its cause, the cause of that."""
    while problem is not None:
        yield problem
        problem = problem.__cause__
