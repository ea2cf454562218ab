"""A hub in memory in place of the client of huggingface_hub, with what is needed to commit and to read."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import HfApi

TOKEN = "hf_" + "a" * 34


class Hub:
    """Repositories by name: commits in their order, each with the bytes of all its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of downloads
        self.repositories: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.asked: list[str] = []
        self.private: set[str] = set()
        self.refusal: str | None = None  # that every request is answered with
        self.before_commit: Any = None

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Make a commit of a repository, and the repository where it is not there."""
        commits = self.repositories.setdefault(name, [])
        whole = {**(commits[-1][1] if commits else {}), **files}
        commit = hashlib.sha1(f"{name}{len(commits)}{sorted(whole)}".encode()).hexdigest()
        commits.append((commit, whole))
        return commit

    def client(self, endpoint: str | None = None, token: str | None = None) -> Any:
        """What `huggingface_hub.HfApi` gives, with its signatures."""
        self.token = token or os.environ.get("HF_TOKEN")
        ours = {
            "repo_info": self._info, "hf_hub_download": self._download, "create_repo": self._create,
            "create_commit": self._commit,
        }  # fmt: skip

        def of(name: str) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                inspect.signature(getattr(HfApi, name)).bind(None, *arguments, **options)
                return ours[name](*arguments, **options)

            return call

        return SimpleNamespace(**{name: of(name) for name in ours})

    def _at(self, name: str, revision: str | None, *, writes: bool = False) -> tuple[str, dict[str, bytes]]:
        self.asked.append(name)
        if self.refusal is not None:
            raise OSError(self.refusal)
        if writes and self.token != TOKEN:
            raise PermissionError("Forbidden: pass a token that may write.")
        commits = self.repositories.get(name, [])
        for commit in reversed(commits):
            if revision in (None, commit[0]):
                return commit
        raise LookupError("Revision Not Found" if commits else "Repository Not Found")

    def _info(self, name: str, *, revision: str | None = None, timeout: float) -> Any:
        commit, files = self._at(name, revision)
        return SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=file) for file in files])

    def _download(self, name: str, path: str, *, revision: str, etag_timeout: float) -> str:
        commit, files = self._at(name, revision)
        place = self.folder / commit / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(files[path])
        return str(place)

    def _create(self, name: str, *, private: bool, exist_ok: bool) -> None:
        if name not in self.repositories and self.token == TOKEN:
            self.add(name, {})
            self.private |= {name} if private else set()
        self._at(name, None, writes=True)

    def _commit(
        self, name: str, operations: Sequence[Any], *, commit_message: str, parent_commit: str | None = None
    ) -> Any:
        if self.before_commit is not None:
            self.before_commit()
        last, _ = self._at(name, None, writes=True)
        if parent_commit not in (None, last):
            raise RuntimeError("A commit has happened since.")
        files = {}
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()
        return SimpleNamespace(oid=self.add(name, files))
