"""Artifacts: a folder with a ``config.json`` and files that are complete or absent.

``config.json`` describes the job. It is written first, with ``finished`` false, so that a folder of another
job is recognised; and last, with a checksum of every file. Each file is written under another name, synced
and renamed, and names its job. An interrupted job resumes with the files that are missing.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matlens import parallel
from matlens.errors import InputError, plain_number
from matlens.io.files import (
    check_file,
    check_size,
    checksummed,
    content_hash,
    damaged,
    describe_file,
    inside,
    locked,
    open_tensors,
    parse_json,
    read_json,
    verified,
    write_files,
)

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT = 6  # of config.json and the files next to it
CONFIG = "config.json"
MODEL_RECORD = "matlens.json"
"""The record of a folder whose ``config.json`` is a Hugging Face model's."""
TENSORS = ".safetensors"
_ENTRY = "matlens"  # the only entry of a safetensors file's metadata
_NAMES = ("base_model_name_or_path", "base_model_revision")  # of a model, told by its fingerprint
_OF_BATCHES = ("batch_tokens", "read")
_LIBRARIES = ("matlens", "torch", "transformers", "transformer-lens", "numpy", "scikit-learn")

Record = Mapping[str, Any]


class Artifact:
    """A folder with the files of one job, written by `writing` and read by `open`.

    ``config`` is the content of ``config.json``: ``holds``, ``request``, ``software``, ``command`` and, once
    the job is finished, ``files`` with a checksum of each.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        self.folder, self.config = Path(folder), dict(config)
        self._job = content_hash({"holds": config["holds"], "request": config["request"]})
        self._verified: set[tuple[str, str]] = set()  # tensors that need not be hashed again

    @property
    def finished(self) -> bool:
        """True if the job is done."""
        return bool(self.config.get("finished"))

    @property
    def request(self) -> dict[str, Any]:
        """The request, as JSON returns it."""
        return self.config["request"]

    @property
    def files(self) -> dict[str, Record]:
        """The checksums of all files of a finished folder, by name."""
        return self.config["files"]

    # Writing

    @classmethod
    @contextmanager
    def writing(cls, folder: str | Path, holds: str, request: Mapping[str, Any]) -> Iterator[Artifact]:
        """Begin, resume or open the folder of a job; only one job at a time works in a folder.

        ``request`` distinguishes the job from others; how it is divided into batches does so only while it is
        unfinished. All processes of a distributed job call this. A job that fails is resumed by the next
        call, as after a kill; a folder into which it has written nothing is removed.
        """
        folder, config = Path(folder), make_config(holds, request)
        with ExitStack() as stack:
            if parallel.is_main():
                found = _same_job(folder, config)
                if found is None or not found.finished:
                    if not folder.exists():
                        stack.callback(_remove_if_empty, folder)  # without the lock, which is a file in it
                    stack.enter_context(locked(folder))
                    found = _same_job(folder, config)  # another process may be done
                if found is not None and found.finished:
                    config = found.config
                else:
                    write_files({folder / CONFIG: checksummed({**config, "finished": False})})
            artifact = cls(folder, parallel.broadcast(config, f"the folder of {holds}"))
            try:
                yield artifact
            except Exception:
                if parallel.is_main() and not artifact.finished and _files(folder) == [folder / CONFIG]:
                    (folder / CONFIG).unlink()
                raise

    @classmethod
    def check_possible(cls, folder: str | Path, holds: str, request: Mapping[str, Any]) -> None:
        """Raise InputError, before any work, if a job could not be done in a folder.

        Unknown parts of the request can be omitted.
        """
        _same_job(Path(folder), make_config(holds, request), partial=True)

    def written(self, names: Iterable[str] | None = None) -> list[str]:
        """Names of the complete files of tensors (of ``names``), every byte of them verified."""
        if names is None:
            names = (path.stem for path in self.folder.glob(f"*{TENSORS}"))
        found = sorted(name for name in names if self._path(name).exists())
        for name in found:
            self.read_all(name)
        return found

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to ``name.safetensors``, synced to the disk."""
        from safetensors.torch import save_file

        own = {key: values.detach().cpu().contiguous() for key, values in tensors.items()}
        if len({values.untyped_storage().data_ptr() for values in own.values()}) < len(own):
            own = {key: values.clone() for key, values in own.items()}  # safetensors refuses two in a storage
        hashes = {key: _hash(values) for key, values in own.items()}
        header = checksummed({"job": self._job, "name": name, "tensors": hashes})
        # One entry: safetensors writes several in another order each time.
        metadata = {_ENTRY: json.dumps(header)}
        write_files({self._path(name): lambda path: save_file(own, path, metadata=metadata)})
        self._verified |= {(name, key) for key in own}

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a record to ``name.json``."""
        write_files({self.folder / f"{name}.json": checksummed({"job": self._job, "content": content})})

    def remove(self, *names: str) -> None:
        """Remove files of tensors that are no longer needed."""
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def finish(self) -> None:
        """Finish the job, once all of its processes have written their files."""
        parallel.barrier(f"the files of {self.config['holds']}")
        if parallel.is_main():
            paths = [path for path in _files(self.folder) if path != self.folder / CONFIG]
            files = {path.relative_to(self.folder).as_posix(): self._record(path) for path in paths}
            write_files(
                {self.folder / CONFIG: checksummed({**self.config, "finished": True, "files": files})}
            )
        parallel.barrier(f"the end of {self.config['holds']}")
        self.config = _read_config(self.folder).config

    def _record(self, path: Path) -> dict[str, Any]:
        if path.suffix == TENSORS and path.parent == self.folder:
            with self._opened(path.stem) as (_, hashes):
                return {"bytes": path.stat().st_size, "tensors": hashes}
        return describe_file(path)

    # Reading

    @classmethod
    def open(cls, folder: str | Path, holds: str) -> Artifact:
        """Open a finished folder."""
        folder = Path(folder)
        try:
            artifact = _read_config(folder)
        except OSError as error:
            raise InputError(f"{folder} must be a saved matlens folder of type {holds!r}: {error}") from error
        found = artifact.config["holds"]
        if found != holds:
            raise InputError(f"{folder} must be a saved matlens folder of type {holds!r}, got {found!r}.")
        if not artifact.finished:
            raise InputError(
                f"{folder} is unfinished: its job was interrupted or is still running. Rerun the same "
                "command to resume it."
            )
        for name, record in artifact.files.items():
            check_size(inside(folder, name), record)
        return artifact

    def tensors(self, name: str) -> list[str]:
        """Names of the tensors in a file of tensors."""
        with self._opened(name) as (_, hashes):
            return list(hashes)

    def read(self, name: str, tensor: str) -> Tensor:
        """Map a tensor of ``name.safetensors`` from the disk, and verify it when it is first read."""
        with self._opened(name) as (file, hashes):
            values = file.get_tensor(tensor)
        if (name, tensor) not in self._verified and _hash(values) != hashes.get(tensor):
            raise damaged(self._path(name), f"does not hold the tensor {tensor} that was written")
        self._verified.add((name, tensor))
        return values

    def read_all(self, name: str) -> dict[str, Tensor]:
        """All tensors of a file of tensors."""
        return {tensor: self.read(name, tensor) for tensor in self.tensors(name)}

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a record that `write_json` wrote; ``None`` if there is none."""
        path = inside(self.folder, f"{name}.json")
        if not path.exists():
            return None
        record = verified(read_json(path), path)
        if record.get("job") != self._job:
            raise damaged(path, "was written by another job")
        return record["content"]

    def check(self) -> None:
        """Verify all files byte by byte; raises InputError on damage."""
        if not self.finished:
            self.written()
        for name, record in self.config.get("files", {}).items():
            if "tensors" in record:
                self.read_all(name.removesuffix(TENSORS))
            else:
                check_file(inside(self.folder, name), record)

    def _path(self, name: str) -> Path:
        return inside(self.folder, f"{name}{TENSORS}")

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, dict[str, str]]]:
        """A file of tensors and the hash of each, if this job wrote it and has not replaced it since."""
        path = self._path(name)
        with open_tensors(path, partial(damaged, path)) as file:
            header = verified(parse_json((file.metadata() or {}).get(_ENTRY, ""), str(path)), path)
            listed = self.files.get(path.name, {}).get("tensors") if self.finished else header["tensors"]
            if (header["job"], header["name"], header["tensors"]) != (self._job, name, listed):
                raise damaged(path, f"is not the file that {CONFIG} lists, or was written again since")
            yield file, header["tensors"]


def make_config(holds: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Content of ``config.json``: type, request, and library versions."""
    return {
        "layout": LAYOUT,
        "holds": holds,
        "request": json.loads(json.dumps(request, default=plain_number)),
        "software": software_versions(),
        "command": command_line(),
    }


def software_versions() -> dict[str, str]:
    """Versions of the libraries that computed the result."""
    return {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES}


def command_line() -> str:
    """The command line, quoted for a shell."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def is_record(record: Any) -> bool:
    """True for the JSON of a folder that matlens wrote, damaged or not."""
    return isinstance(record, dict) and record.keys() >= {"layout", "holds", "request"}


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of a folder, such as ``config.json``."""
    record = read_json(inside(path.parent, path.name))
    if not is_record(record):
        raise InputError(f"{path} was not written by matlens. Choose another folder.")
    if record.get("layout") != LAYOUT:
        raise InputError(f"{path.parent} was written by another version of matlens. Remove it and rerun.")
    return verified(record, path)


def is_finished(folder: str | Path) -> bool:
    """True if a folder contains a finished artifact, by its ``config.json``."""
    try:
        return bool(read_json(Path(folder) / CONFIG).get("finished"))
    except (OSError, InputError, AttributeError):
        return False


def _read_config(folder: Path) -> Artifact:
    return Artifact(folder, read_record(folder / CONFIG))


def _same_job(folder: Path, config: Mapping[str, Any], *, partial: bool = False) -> Artifact | None:
    """The artifact in a folder, ``None`` in a new one; raises InputError if it is of another job."""
    try:
        found = _read_config(folder)
    except FileNotFoundError:
        if folder.is_dir() and _files(folder):
            raise InputError(
                f"{folder} holds other files. Choose a new or empty folder, or one of the same command."
            ) from None
        return None
    stored, requested = (_flat({"holds": of["holds"], **of["request"]}) for of in (found.config, config))
    ignored = _OF_BATCHES if found.finished else ()
    differing = [
        key
        for key in (requested if partial else {**requested, **stored})
        if requested.get(key) != stored.get(key)
        and key not in ignored
        and key.rpartition(".")[2] not in _NAMES
    ]
    if differing:
        each = (f"{key}: {stored.get(key)!s:.60} there, {requested.get(key)!s:.60} now" for key in differing)
        differences = "; ".join(islice(each, 8))
        raise InputError(
            f"{folder} belongs to another job ({differences}). Choose another folder, or remove it."
        )
    return found


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _files(folder: Path) -> list[Path]:
    """All files of a folder but hidden ones, which are locks and partial files."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _hash(values: Tensor) -> str:
    """The SHA-256 of a tensor's type, shape and bytes in a file."""
    import torch

    digest = hashlib.sha256(f"{values.dtype} {list(values.shape)}".encode())
    digest.update(values.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
