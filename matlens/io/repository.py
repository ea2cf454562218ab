"""A repository of the hub: what is in it at a commit, its files, and commits that add more.

The hub's client waits for ever for one that says nothing, and its errors are those of several libraries. Here
nothing is waited for longer than `PATIENCE`, and whatever goes wrong is said in one way.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matlens.errors import InputError, checked, printable, short

PATIENCE = 20.0  # seconds that a hub may say nothing
_REASON = 300
_CONFLICT, _EXISTS = 412, 409


class HubConflict(Exception):
    """Somebody else has made a commit since the one that is built on."""


@checked
@dataclass(frozen=True)
class HubSnapshot:
    """What is in a repository at a commit.

    Attributes
    ----------
    commit
        Forty hex digits, which name it for good; ``None`` where there is no such repository.
    files
        Paths of its files.
    """

    commit: str | None
    files: tuple[str, ...]


@checked
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
        What lets in, by default that of ``hf auth login`` or ``HF_TOKEN``.
    """

    name: str
    endpoint: str | None = None
    token: str | None = None

    def snapshot(self, revision: str | None = None, *, absent: bool = False) -> HubSnapshot:
        """What is in it at a branch, a tag or a commit, by default the branch ``main``.

        Parameters
        ----------
        revision
            The branch, tag or commit.
        absent
            Whether it may not be there at all, which is a snapshot without a commit.

        Raises
        ------
        InputError
            There is none that can be read, or the hub does not answer.
        """
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._asking("read"):
            try:
                info = self._api.repo_info(self.name, revision=revision, timeout=PATIENCE)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError as error:
                if absent and error.response.status_code == 404:  # not 401: that says nothing of it
                    return HubSnapshot(None, ())
                raise
        return HubSnapshot(str(info.sha), tuple(file.rfilename for file in info.siblings or ()))

    def download(self, path: str, commit: str) -> Path:
        """A file at a commit, from the cache of the hub's client where it is there already.

        Raises
        ------
        InputError
            It is not there, or the hub does not answer.
        """
        from huggingface_hub.errors import LocalEntryNotFoundError

        with self._asking("read"):
            try:
                return Path(
                    self._api.hf_hub_download(self.name, path, revision=commit, etag_timeout=PATIENCE)
                )
            except LocalEntryNotFoundError as error:
                raise error.__cause__ or error from None

    def commit(
        self,
        files: Mapping[str, bytes | Path],
        *,
        message: str,
        onto: HubSnapshot,
        private: bool = False,
    ) -> str:
        """Add files, or put others in their place, all in one commit.

        Parameters
        ----------
        files
            What is put at each path.
        message
            What the commit says.
        onto
            What was there before. Where there was nothing a repository is made.
        private
            Whether a repository that is made can be read by its owner alone.

        Returns
        -------
        commit
            Its forty hex digits.

        Raises
        ------
        InputError
            It is not allowed, or the hub does not answer.
        HubConflict
            Something else is there by now.
        """
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.errors import HfHubHTTPError

        with self._asking("written to"):
            if onto.commit is None:
                self._create(private)
            additions = [
                CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
                for path, content in files.items()
            ]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of the client's own calls
                    made = self._api.create_commit(
                        self.name, additions, commit_message=message, parent_commit=onto.commit
                    )
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code == _CONFLICT:
                    raise HubConflict(str(error)) from error
                raise
        return str(made.oid)

    def _create(self, private: bool) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            self._api.create_repo(self.name, private=private)
        except HfHubHTTPError as error:
            if error.response is None or error.response.status_code != _EXISTS:
                raise

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Wait no longer than `PATIENCE` for each answer, and say in words what went wrong."""
        from huggingface_hub import get_session
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            RemoteEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        session = get_session()
        before, session.timeout = session.timeout, PATIENCE
        where = f"The repository {short(self.name)}"
        try:
            yield
        except HFValidationError as error:
            raise InputError(
                f"{short(self.name)} is no name of a repository ({_reason(error)}). Expected such as "
                "'someone/lenses'."
            ) from error
        except RevisionNotFoundError as error:
            raise InputError(
                f"{where} has no such revision ({_reason(error)}). Expected a branch, a tag or a commit of "
                "it."
            ) from error
        except RemoteEntryNotFoundError as error:
            raise InputError(f"{where} has no such file ({_reason(error)}).") from error
        except (GatedRepoError, RepositoryNotFoundError) as error:
            raise InputError(
                f"{where} is not there, or may not be {what} ({_reason(error)}). Check its name, and log in "
                "with 'hf auth login' or HF_TOKEN where it is private."
            ) from error
        except OfflineModeIsEnabled as error:
            raise InputError(
                f"{where} cannot be {what}: HF_HUB_OFFLINE is set. Unset it, or use a folder on disk."
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                raise InputError(
                    f"{where} may not be {what} ({_reason(error)}). Log in with 'hf auth login' or HF_TOKEN, "
                    "with a token that may write."
                ) from error
            raise InputError(
                f"{where} could not be {what}: the hub answered {status} ({_reason(error)}). Try again later."
            ) from error
        except (InputError, HubConflict):
            raise
        except Exception as error:  # the HTTP library behind the hub's client has changed before
            at = self.endpoint or "the hub"
            raise InputError(
                f"{where} could not be {what}: {at} does not answer ({_reason(error)}). Check the network, "
                "or use a folder on disk."
            ) from error
        finally:
            session.timeout = before


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(text, most=_REASON)
