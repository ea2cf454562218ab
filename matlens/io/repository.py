"""A repository of the Hugging Face hub: its files at a commit, and commits that add more.

The hub's client waits for ever for a server that sends nothing; here no answer takes longer than `PATIENCE`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matlens.errors import InputError, short

PATIENCE = 20.0  # seconds


@dataclass(frozen=True)
class HubRepository:
    """A repository of models on the hub.

    Attributes
    ----------
    name
        Such as ``"someone/lenses"``.
    endpoint
        Address of the hub, by default that of ``HF_ENDPOINT`` or of the Hugging Face hub.
    token
        By default that of ``hf auth login`` or ``HF_TOKEN``.
    """

    name: str
    endpoint: str | None = None
    token: str | None = None

    def files(self, revision: str | None = None) -> tuple[str, list[str]]:
        """The commit of a branch, a tag or a commit, and the names of its files."""
        with self._asking("read"):
            info = self._api.repo_info(self.name, revision=revision, timeout=PATIENCE)
        return str(info.sha), [file.rfilename for file in info.siblings or ()]

    def download(self, path: str, commit: str) -> Path:
        """A file at a commit, from the cache of the hub's client where it is there already."""
        with self._asking("read"):
            return Path(self._api.hf_hub_download(self.name, path, revision=commit, etag_timeout=PATIENCE))

    def create(self, *, private: bool) -> None:
        """Create the repository if it does not exist."""
        with self._asking("written to"):
            self._api.create_repo(self.name, private=private, exist_ok=True)

    def commit(self, files: Mapping[str, bytes | Path], *, message: str, parent: str) -> str:
        """Add or replace files in one commit, which is refused if there is another since ``parent``."""
        from huggingface_hub import CommitOperationAdd

        additions = [
            CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
            for path, content in files.items()
        ]
        with self._asking("written to"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the client's own calls
            made = self._api.create_commit(self.name, additions, commit_message=message, parent_commit=parent)
        return str(made.oid)

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Time out after `PATIENCE` seconds, and raise InputError for any failure."""
        from huggingface_hub import get_session

        session = get_session()
        before, session.timeout = session.timeout, PATIENCE
        try:
            yield
        except Exception as error:  # of the hub's client or of the HTTP library that it uses
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InputError(
                f"The repository {short(self.name)} cannot be {what}: {reason} Check its name and revision, "
                "your token ('hf auth login' or HF_TOKEN) and the network, or use a folder on disk."
            ) from error
        finally:
            session.timeout = before
