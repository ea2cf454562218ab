"""The command that clusters value vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from matlens.cli.options import Device, Dtype, DtypeChoice, Memory, Model, Out, Revision, Trust
from matlens.cli.terminal import Read, ReadChoice, TopTokens, load_model, print_table, projection_of

_TOLD = 3  # vectors that are named of each cluster


def cluster(
    model: Model,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Value vectors, such as L3D12, whose clusters to show.", show_default=False),
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters.")] = 10_000,
    memory: Memory = 4.0,
    limit: Annotated[int, typer.Option(min=1, help="Without names, show so many, the largest.")] = 20,
    tokens: TopTokens = 10,
    out: Out = Path("out"),
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Cluster all value vectors by their cosines, and show the largest clusters or those of value vectors.

    The clusters are kept in the output folder, so that the next call has them.
    """
    from matlens.ffn.clusters import cluster_table
    from matlens.ffn.values import ValueVector, ValueVectors
    from matlens.study.ffn import clustered

    for name in names or ():  # before the model, which can take minutes
        ValueVector.parse(name)
    loaded = load_model(model, device, dtype, revision, trust_remote_code)
    values = ValueVectors(loaded)
    resolved = [values.resolve(name) for name in names or ()]  # and before the work
    found = clustered(values, out, clusters, memory=memory)
    chosen = found.holding(values, resolved) if resolved else list(range(min(limit, len(found))))
    table = cluster_table(values, projection_of(loaded, read), found, chosen, n_tokens=tokens)
    how = "exactly" if found.method == "exact" else "by near neighbours"
    title = f"{len(values):,} value vectors in {len(found):,} clusters, {how}"
    asked = list(map(str, resolved))
    told = table.assign(
        layers=[
            _layers(first, last)
            for first, last in zip(table["first_layer"], table["last_layer"], strict=True)
        ],
        cosine=[_cosine(cosine) for cosine in table["cosine"]],
        members=[_members(members, asked) for members in table["members"]],
    )
    rows = told[["cluster", "size", "layers", "cosine", "members", "tokens"]].to_numpy().tolist()
    print_table(title, ("cluster", "size", "layers", "cosine", "vectors", "top tokens of their mean"), rows)


def _layers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _cosine(cosine: float) -> str:
    return "–" if cosine != cosine else f"{cosine:.2f}"


def _members(names: str, asked: Sequence[str]) -> str:
    """Those that were asked for, and then a few others."""
    members = names.split()
    named = [name for name in members if name in asked]
    told = [*named, *(name for name in members if name not in asked)][: max(_TOLD, len(named))]
    more = f" +{len(members) - len(told)}" if len(told) < len(members) else ""
    return " ".join(told) + more
