"""A repository read and written through a stand-in of the hub, which may be down, slow or unwilling."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_stand_in import TOKEN, Hub

from matlens import InputError
from matlens.io import repository as repository_module
from matlens.io.repository import HubRepository


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    return HubRepository("someone/lenses", hub.address, TOKEN)


def test_files_are_added_in_one_commit_and_read_at_a_commit(
    hub: Hub, repository: HubRepository, tmp_path: Path
) -> None:
    (tmp_path / "large.safetensors").write_bytes(b"numbers" * 100)
    files = {"a.json": b"1", "b/large.safetensors": tmp_path / "large.safetensors"}
    for _ in range(2):  # the second time it exists
        repository.create(private=True)
    assert hub.private == {"someone/lenses"}
    first = repository.commit(files, message="one", parent=repository.files()[0])
    assert (first, {"a.json", "b/large.safetensors"} - {*repository.files()[1]}) == (
        repository.files()[0], set(),
    )  # fmt: skip
    second = repository.commit({"a.json": b"2"}, message="two", parent=first)
    assert repository.files(first)[0] == first != second
    assert repository.download("a.json", first).read_bytes() == b"1"
    assert repository.download("a.json", second).read_bytes() == b"2"
    assert repository.download("b/large.safetensors", second).read_bytes() == b"numbers" * 100
    assert len([path for _, path in hub.asked if "/commit/" in path]) == 2  # one for all files
    with pytest.raises(InputError, match="written to"):  # somebody has made a commit meanwhile
        repository.commit({"a.json": b"3"}, message="three", parent=first)
    hub.refusal = 500
    assert repository.download("a.json", first).read_bytes() == b"1"  # from the cache


@pytest.mark.parametrize(
    ("name", "revision", "path"),
    [
        ("someone/nothing", None, "a.json"),
        ("someone/lenses", "no-such-branch", "a.json"),
        ("someone/lenses", None, "b.json"),
        ("no name", None, "a.json"),
    ],
)
def test_missing_repositories_revisions_and_files_are_refused(
    name: str, revision: str | None, path: str, hub: Hub
) -> None:
    hub.add("someone/lenses", {"a.json": b"1"})
    place = HubRepository(name, hub.address)
    with pytest.raises(InputError, match=name):
        place.download(path, place.files(revision)[0])


def test_a_hub_that_refuses_or_does_not_answer_is_an_input_error(
    hub: Hub, repository: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = HubRepository("someone/lenses", hub.address, "hf_" + "b" * 34)
    commit = hub.add("someone/lenses", {"a.json": b"1"})
    with pytest.raises(InputError, match="written to"):
        stranger.commit({"a.json": b"2"}, message="x", parent=commit)
    assert hub.repositories["someone/lenses"][-1][1] == {"a.json": b"1"}
    hub.refusal = 403
    with pytest.raises(InputError, match="someone/lenses"):
        repository.files()
    hub.refusal = None
    monkeypatch.setattr(repository_module, "PATIENCE", 0.2)
    session = huggingface_hub.get_session()
    before = session.timeout
    hub.silent.set()
    for ask in (repository.files, lambda: repository.create(private=False)):
        with pytest.raises(InputError, match="someone/lenses"):
            ask()
    assert session.timeout == before
    n_asked = len(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="someone/lenses"):
        repository.files()
    assert len(hub.asked) == n_asked
