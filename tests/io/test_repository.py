"""A client of the hub fails with an InputError if the hub is down, slow or unwilling."""

from __future__ import annotations

import huggingface_hub
import pytest
from hub_stand_in import TOKEN

from matlens import InputError
from matlens.io.repository import PATIENCE, HubRepository


def ask(repository: HubRepository, revision: str | None = None) -> str:
    with repository.client("read") as hub:
        return str(hub.repo_info(repository.name, revision=revision, timeout=PATIENCE).sha)


def test_a_hub_that_refuses_or_does_not_answer_is_an_input_error(hub):
    commit = hub.add("someone/lenses", {"a.json": b"1"})
    repository = HubRepository("someone/lenses", token=TOKEN)
    before = huggingface_hub.get_session().timeout
    assert ask(repository) == ask(repository, commit) == commit
    assert hub.timeouts == {PATIENCE}
    assert huggingface_hub.get_session().timeout == before
    for name, revision in (("someone/nothing", None), ("someone/lenses", "no-such-branch")):
        with pytest.raises(InputError, match=name):
            ask(HubRepository(name), revision)
    stranger = HubRepository("someone/lenses", token="hf_" + "b" * 34)
    operation = huggingface_hub.CommitOperationAdd("a.json", b"2")
    with pytest.raises(InputError, match="written to"), stranger.client("written to") as client:
        client.create_commit("someone/lenses", [operation], commit_message="x")
    assert hub.repositories["someone/lenses"][-1][1] == {"a.json": b"1"}
    hub.refusal = "The read operation timed out"
    with pytest.raises(InputError, match=r"someone/lenses.*timed out"):
        ask(repository)
    assert huggingface_hub.get_session().timeout == before
