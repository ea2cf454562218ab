"""Folders that are either finished, or say what they will be and can be gone on with."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matlens.errors import InputError

_UNFINISHED = "unfinished.json"


class Workplace:
    """A folder that one job fills, from the first file to ``config.json``.

    ``request`` says what the job is. A folder whose job is the same is gone on with or, if it is
    finished, left as it is; one of another job is refused.
    """

    def __init__(self, folder: str | Path, request: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        # What is compared is what JSON gives back.
        self.request: dict[str, Any] = json.loads(json.dumps(request))
        self._own = not self.folder.exists()

    @property
    def finished(self) -> bool:
        """Whether the job is done."""
        return (self.folder / "config.json").is_file()

    def open(self) -> None:
        """Make the folder or check that it belongs to this job."""
        with system_errors(self.folder):
            marker = self.folder / ("config.json" if self.finished else _UNFINISHED)
            if marker.is_file():
                self._require_same(json.loads(marker.read_text()).get("request", {}))
                return
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise InputError(
                    f"The folder {self.folder} holds other files. Expected a new or empty folder, or "
                    "one that the same command has begun."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(marker, {"request": self.request})

    def finish(self, **more: Any) -> None:
        """Make the folder a finished one; ``more`` goes beside the request."""
        with system_errors(self.folder):
            write_json(self.folder / "config.json", {**more, "request": self.request})
            (self.folder / _UNFINISHED).unlink(missing_ok=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Fill the folder; if that fails for good, remove what is there. A kill leaves it to go on with."""
        try:
            with system_errors(self.folder):
                self.open()
                yield
        except Exception:
            if (self.folder / _UNFINISHED).is_file():
                shutil.rmtree(self.folder) if self._own else _empty(self.folder)
            raise

    def _require_same(self, other: Mapping[str, Any]) -> None:
        differing = [key for key in self.request if self.request[key] != other.get(key)]
        if differing:
            told = "; ".join(f"{key}: {other.get(key)} there, {self.request[key]} now" for key in differing)
            raise InputError(
                f"The folder {self.folder} belongs to another job ({told}). Choose another folder, or "
                "remove this one."
            )


@contextmanager
def system_errors(path: str | Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in str(error):
            raise InputError(
                f"There is no room on the disk of {path}. Free some, or write elsewhere."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise InputError(
                f"{path} cannot be written: {error.strerror}. Expected a folder that you may write to."
            ) from error
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_config(folder: str | Path, expected: str) -> dict[str, Any]:
    """Read what a finished folder says of itself.

    Raises
    ------
    InputError
        There is no such folder, or its job is unfinished, or it is not what was ``expected``.
    """
    folder = Path(folder)
    if (folder / _UNFINISHED).is_file():
        raise InputError(
            f"The job of {folder} was broken off. Run the same command again, and it goes on from there."
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no finished {expected}: {error}") from error
    if config.get("request", {}).get("holds") != expected:
        raise InputError(f"{folder} does not hold {expected} of matlens.")
    return dict(config)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
