"""Folders that are either finished, or say what they will be and can be gone on with."""

from __future__ import annotations

import errno
import json
import os
import platform
import reprlib
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matlens.errors import InputError
from matlens.signatures import checked

LAYOUT = 2  # of config.json and what lies beside it; a folder of another is refused
_UNFINISHED = "unfinished.json"
_LIBRARIES = ("matlens", "torch", "transformers", "transformer-lens", "numpy", "scikit-learn")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (
    errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG,
    errno.ENOENT,
)  # fmt: skip


class Workplace:
    """A folder that one job fills, from the first file to ``config.json``.

    ``holds`` is what the folder will hold, and ``request`` says what the job is. A folder whose job is the
    same is gone on with or, if it is finished, left as it is; one of another job is refused. Parts of the
    request that are ``only_unfinished`` matter for going on, and no more once the job is done.
    """

    def __init__(
        self,
        folder: str | Path,
        holds: str,
        request: Mapping[str, Any],
        *,
        only_unfinished: tuple[str, ...] = (),
    ) -> None:
        self._only_unfinished = only_unfinished
        self.folder, self.holds = Path(folder), holds
        # What is compared is what JSON gives back.
        self.request: dict[str, Any] = json.loads(json.dumps(request))
        self._begun = False  # whether this call has put the first file into it
        self._made: list[Path] = []  # folders that it has made for that, the innermost first

    @property
    def finished(self) -> bool:
        """Whether the job is done."""
        return (self.folder / "config.json").is_file()

    def open(self) -> None:
        """Make the folder or check that it belongs to this job."""
        with system_errors(self.folder):
            marker = self.folder / ("config.json" if self.finished else _UNFINISHED)
            if marker.is_file():
                self._require_same(marker)
                if self.finished:  # a kill may have left both
                    (self.folder / _UNFINISHED).unlink(missing_ok=True)
                return
            begun = _partial(marker)  # all that a kill at the very start leaves
            if self.folder.is_dir() and any(entry != begun for entry in self.folder.iterdir()):
                raise InputError(
                    f"The folder {self.folder} holds other files. Expected a new or empty folder, or "
                    "one that the same command has begun."
                )
            absent = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begun, self._made = True, absent
            write_json(marker, {"layout": LAYOUT, "holds": self.holds, "request": self.request})

    def finish(self) -> None:
        """Make the folder a finished one."""
        with system_errors(self.folder):
            write_json(self.folder / "config.json", make_config(self.holds, self.request))
            (self.folder / _UNFINISHED).unlink(missing_ok=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Fill the folder.

        If that fails, what this call has begun is removed. A kill leaves it to go on with, and so does
        the failure of a call that went on with what another had begun.
        """
        try:
            self.open()
            with system_errors(self.folder):
                yield
        except Exception:
            if self._begun and not self.finished:
                self._remove()
            raise

    def _remove(self) -> None:
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in self._made:
            if not any(folder.iterdir()):
                folder.rmdir()

    def _require_same(self, marker: Path) -> None:
        try:
            record = json.loads(marker.read_text())
            there = _flat({"holds": record.get("holds"), **record["request"]})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                f"The folder {self.folder} holds a {marker.name} that matlens has not written. Choose "
                "another folder."
            ) from None
        _require_layout(self.folder, record)
        now = _flat({"holds": self.holds, **self.request})
        ignored = self._only_unfinished if self.finished else ()
        differing = [key for key in {**now, **there} if now.get(key) != there.get(key) and key not in ignored]
        if differing:
            names = {key: key.removeprefix("provenance.") for key in differing[:4]}
            differences = "; ".join(
                f"{name}: {_short(there.get(key))} there, {_short(now.get(key))} now"
                for key, name in names.items()
            )
            more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise InputError(
                f"The folder {self.folder} belongs to another job ({differences}{more}). Choose another "
                "folder, or remove this one."
            )


def _short(value: Any) -> str:
    return value if isinstance(value, str) else reprlib.repr(value)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


@contextmanager
def system_errors(path: str | Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        # numpy reports a short write without an error number.
        if error.errno in _FULL or "requested and" in str(error):
            raise InputError(
                f"There is no room on the disk of {path}. Free some, or write elsewhere."
            ) from error
        if error.errno in _REFUSED:
            raise InputError(
                f"{path} cannot be written: {error.strerror}. Expected a folder that you may write to."
            ) from error
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, to_json(content))


def to_json(content: Mapping[str, Any]) -> str:
    """Spell out JSON as it is written everywhere."""
    return json.dumps(content, indent=1) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes | memoryview]) -> None:
    """Write several files whole or none of them."""
    try:
        for path, content in contents.items():
            with _partial(path).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in contents:
            _partial(path).replace(path)
    finally:
        for path in contents:
            _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@checked
def read_config(folder: str | Path, expected: str) -> dict[str, Any]:
    """Read what a finished folder says of itself.

    Raises
    ------
    InputError
        There is no such folder, or its job is unfinished, or it is not what was ``expected``.
    """
    folder = Path(folder)
    if (folder / _UNFINISHED).is_file() and not (folder / "config.json").is_file():
        raise InputError(
            f"The job of {folder} was broken off. Run the same command again, and it goes on from there."
        )
    try:
        config = json.loads((folder / "config.json").read_text())
        dict(config["request"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"The folder {folder} holds no finished {expected}: {error}") from error
    _require_layout(folder, config)
    if config.get("holds") != expected:
        raise InputError(f"The folder {folder} does not hold {expected} of matlens.")
    return dict(config)


def _require_layout(folder: Path, record: Mapping[str, Any]) -> None:
    if record.get("layout") != LAYOUT:
        raise InputError(
            f"The folder {folder} was written by another version of matlens, in another layout. Remove it "
            "and make it anew."
        )


def make_config(holds: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` says of every result: what it is, what was asked for, and what made it."""
    return {
        "layout": LAYOUT,
        "holds": holds,
        "request": dict(request),
        "software": software_versions(),
        "command": command_line(),
    }


def software_versions() -> dict[str, str]:
    """Versions of what computed the result."""
    return {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES}


def command_line() -> str:
    """The command line, as it could be typed again."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
