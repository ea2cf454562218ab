"""Vectors survive Parquet, other libraries read them, and damaged exports are refused."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from matlens import InputError, collect, make_examples
from matlens.activations import read_parquet, write_parquet
from matlens.linear import MapSet

SITES = ["h.0", "attn_out.1", "h.3"]


@pytest.fixture(params=["sampled", "all"])
def collected(request, small_model, sentences, tmp_path):
    """Vectors in memory, and, at all positions, in a folder of several shards."""
    examples = make_examples(small_model("llama"), sentences)
    folder = tmp_path / "collected" if request.param == "all" else None
    return collect(
        small_model("llama"), examples, SITES, positions=request.param, folder=folder, batch_tokens=64,
        progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_memory", [True, False])
def test_round_trip(collected, tmp_path, dtype, in_memory):
    write_parquet(collected, tmp_path / "out", dtype=dtype, progress=False)
    found = read_parquet(tmp_path / "out", folder=None if in_memory else tmp_path / "read", progress=False)
    for site in SITES:
        assert torch.equal(found[site], collected[site].to(dtype).float())
    assert found.positions == collected.positions
    assert found.provenance.identity == collected.provenance.identity
    assert found.examples.fingerprint == collected.examples.fingerprint
    np.testing.assert_array_equal(found.places, collected.places)
    if dtype == torch.float32:
        ours, theirs = (
            MapSet.fit(each, pairs=[("h.0", "h.3")], progress=False)["h.0", "h.3"]
            for each in (found, collected)
        )
        assert torch.equal(ours.weight, theirs.weight)


def test_damaged_exports_are_refused(collected, tmp_path):
    write_parquet(collected, tmp_path / "a", progress=False)
    part = collected.head(8)
    write_parquet(part, tmp_path / "b", progress=False)
    shard = tmp_path / "a" / "vectors-00000.parquet"
    whole = shard.read_bytes()

    def refused(changed: bytes | None) -> None:
        shard.unlink()
        if changed is not None:
            shard.write_bytes(changed)
        with pytest.raises(InputError, match=r"vectors-00000"):
            read_parquet(tmp_path / "a", progress=False)
        shard.write_bytes(whole)

    refused(None)
    refused(whole[: len(whole) // 2])
    refused((tmp_path / "b" / "vectors-00000.parquet").read_bytes())
    values = collected["h.0"][-1].numpy().tobytes()[-16:]  # flip a bit of a vector where it is written
    if values not in whole:
        values = collected["h.0"][0].numpy().tobytes()[:16]
    place = whole.index(values)
    refused(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    shards = sorted((tmp_path / "a").glob("vectors-*"))
    if len(shards) > 1:
        refused(shards[1].read_bytes())
    table = pq.read_table(shard)  # as a shard of an export of other batches is written: a row is there twice
    for same in (table.set_column(0, "row", [table["row"].to_numpy()[::-1] // 2]), table.slice(1)):
        pq.write_table(same, shard)
        with pytest.raises(InputError, match="each of them once"):
            read_parquet(tmp_path / "a", folder=tmp_path / "twice", progress=False)
        assert not (tmp_path / "twice").exists()
    shard.write_bytes(whole)
    write_parquet(collected, tmp_path / "half", dtype=torch.bfloat16, progress=False)
    refused((tmp_path / "half" / "vectors-00000.parquet").read_bytes())
    read_parquet(tmp_path / "half", folder=tmp_path / "read", progress=False)
    with pytest.raises(InputError):  # the folder is another job's
        read_parquet(tmp_path / "a", folder=tmp_path / "read", progress=False)
    (tmp_path / "b" / "examples.parquet").unlink()
    with pytest.raises(InputError, match="not a finished export"):
        read_parquet(tmp_path / "b", progress=False)
    write_parquet(part, tmp_path / "b", progress=False)  # an interrupted export is written again
    assert read_parquet(tmp_path / "b", progress=False).n_rows == part.n_rows
