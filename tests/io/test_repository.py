"""A repository read and written through a stand-in of the hub, which may be down, slow or unwilling."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_stand_in import TOKEN, Hub

from matlens import InputError
from matlens.io import repository as repository_module
from matlens.io.repository import HubConflict, HubRepository, HubSnapshot


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    return HubRepository("someone/lenses", hub.address, TOKEN)


def test_files_are_put_in_one_commit_and_read_at_the_one_that_is_named(
    hub: Hub, repository: HubRepository, tmp_path: Path
) -> None:
    (tmp_path / "large.safetensors").write_bytes(b"numbers" * 100)
    nothing = repository.snapshot(absent=True)
    assert nothing == HubSnapshot(None, ())
    files = {"a.json": b"1", "b/large.safetensors": tmp_path / "large.safetensors"}
    first = repository.commit(files, message="one", onto=nothing)
    snapshot = repository.snapshot()
    assert snapshot.commit == first
    assert {"a.json", "b/large.safetensors"} <= set(snapshot.files)
    second = repository.commit({"a.json": b"2"}, message="two", onto=snapshot)
    assert second != first
    assert repository.snapshot(first).commit == first
    assert repository.download("a.json", first).read_bytes() == b"1"
    assert repository.download("a.json", second).read_bytes() == b"2"
    assert repository.download("b/large.safetensors", second).read_bytes() == b"numbers" * 100
    assert len([path for _, path in hub.asked if "/commit/" in path]) == 2  # one for all files
    assert (
        HubRepository(repository.name, hub.address, TOKEN).commit(
            {"b.json": b"1"}, message="made meanwhile", onto=nothing
        )
        == hub.repositories[repository.name][-1][0]
    )
    with pytest.raises(HubConflict):
        repository.commit({"a.json": b"3"}, message="three", onto=snapshot)
    assert hub.private == set()
    HubRepository("someone/secret", hub.address, TOKEN).commit(
        {"a": b"1"}, message="one", onto=nothing, private=True
    )
    assert hub.private == {"someone/secret"}


def test_what_was_read_once_is_read_again_without_the_hub(hub: Hub, repository: HubRepository) -> None:
    commit = hub.add("someone/lenses", {"a.json": b"1"})
    repository.download("a.json", commit)
    hub.refusal = 500
    assert repository.download("a.json", commit).read_bytes() == b"1"


@pytest.mark.parametrize(
    ("repository_name", "revision", "path"),
    [
        ("someone/nothing", None, "a.json"),
        ("someone/lenses", "no-such-branch", "a.json"),
        ("someone/lenses", None, "b.json"),
        ("no name", None, "a.json"),
    ],
)
def test_what_is_missing_is_refused(repository_name: str, revision: str | None, path: str, hub: Hub) -> None:
    hub.add("someone/lenses", {"a.json": b"1"})
    place = HubRepository(repository_name, hub.address)
    with pytest.raises(InputError, match=repository_name):
        place.download(path, str(place.snapshot(revision).commit))


@pytest.mark.parametrize("status", [401, 403, 418])
def test_a_hub_that_refuses_is_no_missing_repository(
    status: int, hub: Hub, repository: HubRepository
) -> None:
    hub.add("someone/lenses", {})
    hub.refusal = status
    for absent in (False, True):
        with pytest.raises(InputError, match="someone/lenses"):
            repository.snapshot(absent=absent)


def test_who_may_not_write_is_told_before_anything_is_sent(hub: Hub) -> None:
    stranger = HubRepository("someone/lenses", hub.address, "hf_" + "b" * 34)
    commit = hub.add("someone/lenses", {"a.json": b"1"})
    for onto in (HubSnapshot(None, ()), HubSnapshot(commit, ("a.json",))):
        with pytest.raises(InputError, match="written to"):
            stranger.commit({"a.json": b"2"}, message="x", onto=onto)
    assert hub.repositories["someone/lenses"][-1][1] == {"a.json": b"1"}


def test_a_hub_that_says_nothing_is_not_waited_for(
    hub: Hub, repository: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_module, "PATIENCE", 0.2)
    session = huggingface_hub.get_session()
    before = session.timeout
    hub.silent.set()
    with pytest.raises(InputError, match="someone/lenses"):
        repository.snapshot()
    assert session.timeout == before
    with pytest.raises(InputError, match="someone/lenses"):
        repository.commit({"a": b"1"}, message="x", onto=HubSnapshot(None, ()))


def test_nothing_is_asked_offline(
    hub: Hub, repository: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="someone/lenses"):
        repository.snapshot()
    assert hub.asked == []
