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

from matlens.errors import InputError, printable, short

PATIENCE = 20.0  # seconds
_CONFLICT = 412


class HubConflict(Exception):
    """Somebody else has made a commit since the one that was read."""


@dataclass(frozen=True)
class HubSnapshot:
    """The files of a repository at a commit, which is ``None`` where there is no such repository."""

    commit: str | None
    files: tuple[str, ...]


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

    def snapshot(self, revision: str | None = None, *, absent: bool = False) -> HubSnapshot:
        """The files at a branch, a tag or a commit; with ``absent``, the repository may be missing."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._asking("read"):
            try:
                info = self._api.repo_info(self.name, revision=revision, timeout=PATIENCE)
            except RepositoryNotFoundError as error:
                missing = error.response.status_code == 404  # not 401, which says nothing about it
                if absent and missing and not isinstance(error, GatedRepoError):
                    return HubSnapshot(None, ())
                raise
        return HubSnapshot(str(info.sha), tuple(file.rfilename for file in info.siblings or ()))

    def download(self, path: str, commit: str) -> Path:
        """A file at a commit, from the cache of the hub's client where it is there already."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with self._asking("read"):
            try:
                return Path(
                    self._api.hf_hub_download(self.name, path, revision=commit, etag_timeout=PATIENCE)
                )
            except LocalEntryNotFoundError as error:
                raise error.__cause__ or error from None

    def commit(
        self, files: Mapping[str, bytes | Path], *, message: str, onto: HubSnapshot, private: bool = False
    ) -> str:
        """Add or replace files in one commit; where ``onto`` has no commit, the repository is created.

        Raises
        ------
        HubConflict
            Somebody has made a commit since ``onto``.
        """
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.errors import HfHubHTTPError

        additions = [
            CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
            for path, content in files.items()
        ]
        with self._asking("written to"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the client's own calls
            if onto.commit is None:
                self._api.create_repo(self.name, private=private, exist_ok=True)
            try:
                made = self._api.create_commit(
                    self.name, additions, commit_message=message, parent_commit=onto.commit
                )
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code == _CONFLICT:
                    raise HubConflict(str(error)) from error
                raise
        return str(made.oid)

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Wait no longer than `PATIENCE` for an answer, and raise InputError for whatever goes wrong."""
        from huggingface_hub import get_session

        session = get_session()
        before, session.timeout = session.timeout, PATIENCE
        try:
            yield
        except (InputError, HubConflict):
            raise
        except Exception as error:  # of the hub's client or of the HTTP library that it uses
            reason = printable(" ".join(str(error).split()) or type(error).__name__, most=300)
            raise InputError(
                f"The repository {short(self.name)} cannot be {what}: {reason} Check its name and revision, "
                "your token ('hf auth login' or HF_TOKEN) and the network, or use a folder on disk."
            ) from error
        finally:
            session.timeout = before
