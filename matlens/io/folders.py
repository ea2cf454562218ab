"""Folders that are either finished, or say what they will be and can be gone on with."""

from __future__ import annotations

import json
import os
import platform
import reprlib
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matlens import parallel
from matlens.errors import InputError, checked, plain_number, printable
from matlens.io.files import SEAL, check_seal, damaged, read_json, sealed, system_errors, write_json
from matlens.io.locks import LOCK, is_transient, locked
from matlens.io.notes import NOTES, UNFINISHED

LAYOUT = 3  # of config.json and what lies beside it; a folder of another is refused
CONFIG = "config.json"
BESIDE = "matlens.json"
"""What matlens says of a folder whose ``config.json`` is a model's."""
FILES = "run.json"
"""The list of what lies beside the folders of a run: its table of results and its figures."""
_NAMES = ("base_model_name_or_path", "base_model_revision")  # of a model
_DERIVED = frozenset({
    "fingerprint", "corpus_fingerprint", "rounded", "unembed_hash", "examples", "tokens", "n_tokens",
    "tokenization", "hooks",
})  # fmt: skip
_LIBRARIES = ("matlens", "torch", "transformers", "transformer-lens", "numpy", "scikit-learn")


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
        self.request: dict[str, Any] = json.loads(json.dumps(request, default=plain_number))
        self._begun = False  # whether this call has put the first file into it

    @property
    def finished(self) -> bool:
        """Whether the job is done."""
        return (self.folder / CONFIG).is_file()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Fill the folder, as the only one that does.

        Where another process is at work in it, this waits until that has ended, and finds the folder
        finished. If the work fails, what this call has begun is removed. A kill leaves it to go on with, and
        so does the failure of a call that went on with what another had begun, or the loss of a process that
        shares the work.

        Raises
        ------
        InputError
            The folder belongs to another job, or cannot be written.
        """
        made: list[Path] = []
        try:
            with ExitStack() as lock:
                with system_errors(self.folder):
                    if not self._is_left_finished():
                        made = lock.enter_context(locked(self.folder))
                        self._open()
                try:
                    with system_errors(self.folder):
                        yield
                except parallel.ProcessLost:  # as after a kill, the job can be gone on with
                    self._begun = False
                    raise
                except Exception:
                    if self._begun and not self.finished:
                        self._empty()
                    raise
        except Exception:
            if self._begun and not self.finished:
                for folder in made:
                    with suppress(OSError):  # it holds the files of others
                        folder.rmdir()
            raise

    def check_possible(self) -> None:
        """Refuse, before any work, a folder in which the job could not be done.

        Parts of the request that are not known yet can be left out of it.

        Raises
        ------
        InputError
            The folder holds other files or another job, or no folder stands there.
        """
        with system_errors(self.folder):
            marker = self.folder / (CONFIG if self.finished else UNFINISHED)
            if marker.is_file():
                self._check_same(marker, partly=True)
            elif os.path.lexists(self.folder) and not self.folder.is_dir():
                raise InputError(f"{self.folder} is no folder. Expected a new or empty folder.")
            elif self.folder.is_dir():
                self._is_begun()

    def finish(self, files: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Make the folder a finished one.

        Parameters
        ----------
        files
            Records of files that are known already; the others are looked at.
        """
        from matlens.io.arrays import describe_file  # torch, which what only reads records can spare

        with system_errors(self.folder):
            names = sorted(path.name for path in self.folder.iterdir() if not _is_marker(path.name))
            known = files or {}
            records = {name: known.get(name) or describe_file(self.folder / name) for name in names}
            config = {**make_config(self.holds, self.request), "files": records}
            write_json(self.folder / CONFIG, sealed(config))
            self._remove_markers()

    def _is_left_finished(self) -> bool:
        """Whether there is nothing to be done; the folder of another job is refused at once.

        What else is there is no matter before the folder is locked: another process may be at work.
        """
        if not self.finished:
            with suppress(FileNotFoundError):
                self._check_same(self.folder / UNFINISHED)
            return False
        self._check_same(self.folder / CONFIG)
        if any(_is_marker(entry.name) and entry.name != CONFIG for entry in self.folder.iterdir()):
            with suppress(OSError, InputError), locked(self.folder):  # read it may be, if not written to
                self._remove_markers()  # a kill may have left them
        return True

    def _remove_markers(self) -> None:
        for name in (NOTES, UNFINISHED):
            (self.folder / name).unlink(missing_ok=True)

    def _open(self) -> None:
        """Check that the folder belongs to this job, or begin it."""
        if self.finished:
            self._check_same(self.folder / CONFIG)
            self._remove_markers()
        elif not self._is_begun():
            self._begun = True
            content = {"layout": LAYOUT, "holds": self.holds, "request": self.request}
            write_json(self.folder / UNFINISHED, sealed(content))

    def _is_begun(self) -> bool:
        """Whether the job has been begun in the folder, which is refused if it is not this job's."""
        marker = self.folder / UNFINISHED
        if marker.is_file():
            self._check_same(marker)
            return True
        if not all(is_transient(entry.name) for entry in self.folder.iterdir()):
            raise InputError(
                f"The folder {self.folder} holds other files. Expected a new or empty folder, or "
                "one that the same command has begun."
            )
        return False

    def _empty(self) -> None:
        # What says whose the folder is goes last: a kill on the way leaves it to go on with.
        entries = [entry for entry in self.folder.iterdir() if not is_transient(entry.name)]
        for entry in sorted(entries, key=lambda entry: entry.name == UNFINISHED):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _check_same(self, marker: Path, *, partly: bool = False) -> None:
        record = read_record(self.folder, marker)
        there, now = (
            _flat({"holds": holds, **request})
            for holds, request in ((record["holds"], record["request"]), (self.holds, self.request))
        )
        ignored = self._only_unfinished if self.finished else ()
        compared = now if partly else {**now, **there}
        differing = [
            key
            for key in compared
            if now.get(key) != there.get(key) and key not in ignored and not _only_names(key, now, there)
        ]
        if differing:
            # What a user has changed comes first; digests of it say no more, unless nothing else differs.
            differing.sort(key=_is_derived)
            chosen = [key for key in differing if not _is_derived(key)] or differing
            differences = "; ".join(_difference(key, there.get(key), now.get(key)) for key in chosen[:4])
            more = f"; and {len(chosen) - 4} more" if len(chosen) > 4 else ""
            raise InputError(
                f"The folder {self.folder} belongs to another job ({differences}{more}). Choose another "
                "folder, or remove this one."
            )


def _only_names(key: str, now: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether something says how a model is called, of which a fingerprint says that it is the same."""
    of, _, name = key.rpartition(".")
    fingerprint = f"{of}.fingerprint"
    return name in _NAMES and fingerprint in now and now[fingerprint] == there.get(fingerprint)


def _is_derived(key: str) -> bool:
    """Whether something follows from the model and the texts, such as a digest of them."""
    return any(part in _DERIVED for part in key.split("."))


def _difference(key: str, there: Any, now: Any) -> str:
    if key == "provenance.data.n":
        return f"{there} sentences there, {now} now"
    return f"{key.removeprefix('provenance.')}: {_short(there)} there, {_short(now)} now"


def _is_marker(name: str) -> bool:
    return name in (CONFIG, UNFINISHED, NOTES) or is_transient(name)


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value[:3]) + (f" and {len(value) - 3} more" if len(value) > 3 else "") or "nothing"
    return value if isinstance(value, str) else reprlib.repr(value)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _with_article(holds: Any) -> str:
    name = str(holds)
    article = "an" if name[:1] in "aeiou" else "a"
    return name if name.endswith("s") else f"{article} {name}"


@checked
def read_config(folder: str | Path, expected: str) -> dict[str, Any]:
    """Read what a finished folder says of itself.

    Raises
    ------
    InputError
        There is no such folder, or its job is unfinished, or it is not what was ``expected``, or its
        ``config.json`` is not what was written.
    """
    folder = Path(folder)
    if (folder / UNFINISHED).is_file() and not (folder / CONFIG).is_file():
        state = "is still at work, or was" if (folder / LOCK).exists() else "was"
        raise InputError(
            f"The job of {folder} {state} broken off. Run the same command again, and it goes on from there."
        )
    try:
        config = read_record(folder, folder / CONFIG)
    except OSError as error:
        raise InputError(f"The folder {folder} holds no finished {expected}: {error}") from error
    if config["holds"] != expected:
        raise InputError(
            f"The folder {folder} holds {_with_article(config['holds'])} of matlens. Expected a folder that "
            f"holds {_with_article(expected)}."
        )
    if not isinstance(config.get("files"), dict):
        raise damaged(folder / CONFIG, "has no record of its files")
    return config


@contextmanager
def reading_record(folder: str | Path) -> Iterator[None]:
    """Refuse a folder whose ``config.json`` does not say what its files need to be read.

    Somebody has written it anew, with a digest that fits.

    Raises
    ------
    InputError
        What is done in the context fails, as it does where something is missing or of another kind.
    """
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        cause = printable(f"{type(error).__name__}: {error}", most=200)
        raise damaged(Path(folder) / CONFIG, f"does not say what belongs to its files ({cause})") from error


def is_record(record: Any) -> bool:
    """Whether JSON looks like what matlens writes of a folder, damaged or not."""
    keys = ("layout", "holds", "request", SEAL)
    return isinstance(record, dict) and sum(key in record for key in keys) > 1


def read_record(folder: Path, marker: Path) -> dict[str, Any]:
    """What ``config.json`` or ``unfinished.json`` says, as it was written."""
    record = read_json(marker)
    if not is_record(record):
        raise InputError(
            f"The folder {folder} holds a {marker.name} that matlens has not written. Choose another folder."
        )
    if record.get("layout") != LAYOUT:
        raise InputError(
            f"The folder {folder} was written by another version of matlens, in another layout. Remove it "
            "and make it anew."
        )
    check_seal(record, marker)
    if not isinstance(record.get("request"), dict) or not isinstance(record.get("holds"), str):
        raise damaged(marker, "does not say what the folder holds")
    return record


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
