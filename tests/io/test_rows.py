"""Rows land where they should, in memory and in shards, however batches and processes divide them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matlens import InputError
from matlens.io import rows
from matlens.io.rows import Column, read_rows, writing_rows

COLUMNS = {"h.0": Column(3), "token": Column(2, "int32"), "count": Column(1, "int64")}


@settings(derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), n_rows=st.integers(1, 60), shard_bytes=st.sampled_from([1, 200, 1 << 28]))
def test_rows_land_where_they_should(data, n_rows, shard_bytes, tmp_path_factory):
    order = np.array(data.draw(st.permutations(range(n_rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, n_rows), max_size=6)))
    batches = [index for index in np.split(order, cuts) if len(index)]
    generator = torch.Generator().manual_seed(n_rows)
    whole = {
        "h.0": torch.randn(n_rows, 3, generator=generator),
        "token": torch.randint(-(2**31), 2**31 - 1, (n_rows, 2), dtype=torch.int32, generator=generator),
        "count": torch.randint(2**60, (n_rows, 1), generator=generator),
    }

    folder = tmp_path_factory.mktemp("rows") / "r"
    arrays = {"lengths": np.arange(4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_SHARD_BYTES", shard_bytes)
        for place in (None, folder):
            counts = list(map(len, batches))
            with writing_rows("rows", {}, COLUMNS, counts, folder=place, arrays=arrays) as writer:
                for number in writer.missing:
                    index = batches[number]
                    writer.add(index, {name: of[torch.from_numpy(index)] for name, of in whole.items()})
            for name, of in whole.items():
                assert writer.rows[name].dtype == of.dtype
                assert torch.equal(writer.rows[name], of)
    _, beside, read = read_rows(folder, "rows")
    assert np.array_equal(beside["lengths"], arrays["lengths"])
    assert all(torch.equal(read[name], of) for name, of in whole.items())
    for index, part in read.shards(list(whole)):
        assert all(torch.equal(part[name], of[torch.from_numpy(index)]) for name, of in whole.items())


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 1, 3]])
def test_rows_that_are_not_each_there_once_are_damage(index, tmp_path):
    with writing_rows("rows", {}, {"h.0": Column(3)}, [4], folder=tmp_path / "r") as writer:
        writer.add(np.array(index), {"h.0": torch.ones(len(index), 3)})
    for read in (lambda: writer.rows["h.0"], lambda: list(writer.rows.shards(["h.0"]))):
        with pytest.raises(InputError, match="each of them once"):
            read()
