"""Finished runs: the same one is answered from its folder, and one that differs in anything is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from matlens.errors import InputError
from matlens.io.artifact import Artifact
from matlens.io.tables import write_results
from matlens.io.verification import verify
from matlens.study.output import RUN, RunNote, corpus_identity, model_identity, write_list


def options(folder: Path, **changed: Any) -> dict[str, dict[str, Any]]:
    """What a run was asked for, with some of it changed."""
    model = {"model": str(folder / "model"), "revision": None, "trust_remote_code": False}
    corpus = {"corpus": str(folder / "words.txt"), "limit": None}
    groups = {"model": model, "corpus": corpus, "fit": {"pairs": "all", "ridge": None}}
    return {
        name: group | {key: changed[key] for key in group if key in changed} for name, group in groups.items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a corpus, and the folder of a run of them that is finished and has left its note."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(100)))
    (tmp_path / "words.txt").write_text("these are words\n")
    out = tmp_path / "out"
    for part in ("train", "validation", "maps"):
        with Artifact.writing(out / part, part, {"seed": 0}) as artifact:
            artifact.write_text("rows", "12345678")
            artifact.finish()
    write_results(out, "results", pd.DataFrame({"value": [1.0]}), {"listed_in": RUN})
    (out / "r2.png").write_bytes(b"a figure")
    note = RunNote(out, options(tmp_path))
    assert not note.answers()
    note.write()
    return tmp_path


def answers(folder: Path, **changed: Any) -> bool:
    return RunNote(folder / "out", options(folder, **changed)).answers()


def overwrite(path: Path, content: bytes) -> None:
    """Change a file and leave its size and its times as they were."""
    before, size = path.stat(), path.stat().st_size
    path.write_bytes(content + path.read_bytes()[len(content) :])
    assert path.stat().st_size == size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_same_run_is_answered(folder: Path) -> None:
    assert answers(folder)
    assert answers(folder)


@pytest.mark.parametrize(
    "changed",
    [{"ridge": 1.0}, {"pairs": "last"}, {"limit": 3}, {"trust_remote_code": True}],
    ids=str,
)
def test_another_run_is_not(folder: Path, changed: dict[str, Any]) -> None:
    assert not answers(folder, **changed)


def link_folder(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "weights.bin").write_bytes(b"more")
    (folder / "model" / "linked").symlink_to(folder / "elsewhere")


def evaluated_otherwise(folder: Path) -> None:
    """Another table and figures, listed as those of this run were."""
    out = folder / "out"
    listed = json.loads((out / RUN).read_text())
    write_results(out, "results", pd.DataFrame({"value": [2.0]}), {"listed_in": RUN})
    write_list(out, {name: listed[name] for name in ("run", "left")})


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: overwrite(folder / "model/model.safetensors", b"\xff"),
    "a file more": lambda folder: (folder / "model/tokenizer.json").write_text("{}"),
    "an adapter": lambda folder: (folder / "model/adapter_config.json").write_text("{}"),
    "corpus": lambda folder: overwrite(folder / "words.txt", b"those"),
    "table": lambda folder: overwrite(folder / "out/results.csv", b"other"),
    "another evaluation": evaluated_otherwise,
    "a file behind a link": lambda folder: link_folder(folder),
    "no table": lambda folder: (folder / "out/results.csv").unlink(),
    "no origin": lambda folder: (folder / "out/results.json").unlink(),
    "damaged origin": lambda folder: (folder / "out/results.json").write_text("{"),
    "rows cut": lambda folder: (folder / "out/train/rows").write_bytes(b"123"),
    "rows gone": lambda folder: (folder / "out/maps/rows").unlink(),
    "other maps": lambda folder: overwrite(folder / "out/maps/config.json", b'{"layout": 3, "holds": "mops"'),
    "unfinished": lambda folder: (folder / "out/validation/config.json").unlink(),
    "no figure": lambda folder: (folder / "out/r2.png").unlink(),
    "no note": lambda folder: (folder / "out" / RUN).unlink(),
    "empty note": lambda folder: (folder / "out" / RUN).write_text(""),
    "another note": lambda folder: (folder / "out" / RUN).write_text("[3]"),
    "deep note": lambda folder: (folder / "out" / RUN).write_text("[" * 100_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_has_changed_is_seen(folder: Path, change: str) -> None:
    CHANGES[change](folder)
    assert not answers(folder)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [Path.unlink, flip], ids=["gone", "flipped"])
@pytest.mark.parametrize(
    "name",
    ["maps/config.json", "train/config.json", "train/rows", "results.csv", "results.json", "r2.png", RUN],
)
def test_verify_names_every_file_of_a_run_that_is_gone_or_changed(
    name: str, harm: Callable[[Path], None], folder: Path
) -> None:
    out = folder / "out"
    assert not [verdict.damage for verdict in verify(out) if verdict.damage]
    harm(out / name)
    damages = [verdict.damage for verdict in verify(out) if verdict.damage]
    assert any(name.rpartition("/")[2] in damage for damage in damages)


def test_other_software_does_the_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matlens.study.output.software_versions", lambda: {"torch": "another"})
    assert not answers(folder)


def test_what_changes_during_the_run_leaves_no_note(folder: Path) -> None:
    note = RunNote(folder / "out", options(folder))
    overwrite(folder / "words.txt", b"those")
    note.write()
    assert "run" not in json.loads((folder / "out" / RUN).read_text())
    overwrite(folder / "words.txt", b"these")
    assert not answers(folder)


def test_what_cannot_be_read_at_the_end_leaves_no_note(folder: Path) -> None:
    for change in (folder / "out/train/config.json", folder / "words.txt"):
        note = RunNote(folder / "out", options(folder))
        change.unlink()
        note.write()
        assert "run" not in json.loads((folder / "out" / RUN).read_text())
        change.write_text("{}")


def test_the_note_says_nothing_of_the_moment(folder: Path) -> None:
    """Two runs of one request leave the same note, so that folders compare."""
    path = folder / "out" / RUN
    before = path.read_bytes()
    RunNote(folder / "out", options(folder)).write()
    assert path.read_bytes() == before


def test_the_output_folder_inside_the_model_is_no_part_of_it(folder: Path) -> None:
    asked = options(folder)["model"]
    alone = model_identity(asked, but=folder / "elsewhere")
    (folder / "model/out").mkdir()
    (folder / "model/out/results.csv").write_text("")
    assert model_identity(asked, but=folder / "model/out") == alone
    assert model_identity(asked, but=folder / "elsewhere") != alone


def test_only_what_is_sure_is_identified(folder: Path) -> None:
    assert model_identity(options(folder, trust_remote_code=True)["model"], but=folder) is None
    os.mkfifo(folder / "model/pipe")
    with pytest.raises(InputError, match="pipe or a device"):
        model_identity(options(folder)["model"], but=folder)
    assert corpus_identity("wikipedia-sample") is not None
    assert corpus_identity(str(folder)) is None
    assert corpus_identity("name/of:dataset") is None
