"""Folders of moments: joined only where they are shards of one job, each once, undamaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_sentences

import matlens
from matlens.errors import InputError
from matlens.linear import StoredLeastSquares, stream_least_squares


@pytest.fixture(scope="module")
def shards(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders 1-2, 2-2, 1-3, and those of other samples and of other pairs."""
    root = tmp_path_factory.mktemp("shards")
    model = matlens.load(str(model_folder("llama")), device="cpu")
    examples = matlens.make_examples(model, make_sentences())
    other = matlens.make_examples(model, make_sentences(), seed=1)

    def make(name: str, *arguments: Any, **more: Any) -> None:
        given: dict[str, Any] = {"pairs": [(0, 1)], "progress": False, **more}
        stream_least_squares(model, *arguments, root / name, **given)

    make("1-2", examples, part=(1, 2))
    make("2-2", examples, part=(2, 2))
    make("1-3", examples, part=(1, 3))
    make("other", other, part=(2, 2))
    make("pairs", examples, part=(2, 2), pairs=[(0, 2)])
    return root


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("1-2", "1-2"), "got the parts 1/2, 1/2"),
        (("1-2", "copy"), "got the parts 1/2, 1/2"),
        (("2-2", "1-3"), "got the parts 1/3, 2/2"),
        (("1-2", "other"), r"other samples \(data, examples differ\)"),
        (("1-2", "pairs"), "other pairs of sites"),
    ],
)
def test_shards_that_overlap_or_are_of_another_job_are_refused(
    names: tuple[str, str], message: str, shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(shards / "1-2", tmp_path / "copy")
    places = [tmp_path / name if name == "copy" else shards / name for name in names]
    with pytest.raises(InputError, match=message):
        StoredLeastSquares(*places)


def test_missing_shards_are_named(shards: Path, tmp_path: Path) -> None:
    some = StoredLeastSquares(shards / "1-3")
    with pytest.raises(InputError, match="missing are 2/3, 3/3"):
        some.merge(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    both = StoredLeastSquares(shards / "2-2", shards / "1-2")
    both.check_complete()
