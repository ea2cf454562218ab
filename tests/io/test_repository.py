"""A client of the hub fails with an InputError if the hub is down, slow or unwilling."""

from __future__ import annotations

import huggingface_hub.constants
import pytest
from hub_stand_in import TOKEN, Hub

from matlens import InputError
from matlens.io import repository as repository_module
from matlens.io.repository import HubRepository


def ask(repository: HubRepository, revision: str | None = None) -> str:
    with repository.client("read") as hub:
        timeout = repository_module.PATIENCE
        return str(hub.repo_info(repository.name, revision=revision, timeout=timeout).sha)


def test_a_hub_that_refuses_or_does_not_answer_is_an_input_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("someone/lenses", {"a.json": b"1"})
    repository = HubRepository("someone/lenses", hub.address, TOKEN)
    assert ask(repository) == ask(repository, commit) == commit
    for name, revision in (
        ("someone/nothing", None),
        ("someone/lenses", "no-such-branch"),
        ("no name", None),
    ):
        with pytest.raises(InputError, match=name):
            ask(HubRepository(name, hub.address), revision)
    stranger = HubRepository("someone/lenses", hub.address, "hf_" + "b" * 34)
    operation = huggingface_hub.CommitOperationAdd("a.json", b"2")
    with pytest.raises(InputError, match="written to"), stranger.client("written to") as client:
        client.create_commit("someone/lenses", [operation], commit_message="x")
    assert hub.repositories["someone/lenses"][-1][1] == {"a.json": b"1"}
    hub.refusal = 403
    with pytest.raises(InputError, match="someone/lenses"):
        ask(repository)
    hub.refusal = None
    monkeypatch.setattr(repository_module, "PATIENCE", 0.2)
    before = huggingface_hub.get_session().timeout
    hub.silent.set()
    with pytest.raises(InputError, match="someone/lenses"):
        ask(repository)
    assert huggingface_hub.get_session().timeout == before
    n_asked = len(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="someone/lenses"):
        ask(repository)
    assert len(hub.asked) == n_asked
