"""Commands about value vectors: shown, searched, and clustered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from matlens.cli.explore import explore_values
from matlens.cli.groups import ModelOptions, ReadOptions, grouped
from matlens.cli.options import (
    AmongTop,
    Disk,
    LinkageChoice,
    LinkageOption,
    Memory,
    Most,
    Out,
    Words,
)
from matlens.cli.printing import print_line, print_table, top_texts
from matlens.io.numbers import number_text

_N_NAMED = 3  # vectors that are named of each cluster

app = typer.Typer(help="Value vectors of feed-forward layers, read in the vocabulary.", no_args_is_help=True)


@app.command()
@grouped
def show(
    names: Annotated[list[str], typer.Argument(help="Value vectors, such as L3D12.", show_default=False)],
    model: ModelOptions,
    reading: ReadOptions,
) -> None:
    """Show the tokens that value vectors promote and demote most, with their scores."""
    from matlens.ffn.projection import token_table
    from matlens.ffn.values import ValueVector
    from matlens.models.vocabulary import visible

    for name in names:  # before the model, which can take minutes
        ValueVector.parse(name)
    catalogue = model.catalogue()
    table = token_table(catalogue.values, reading.projection(catalogue), names, k=reading.tokens)
    for value, scores in table.groupby("value", sort=False):
        sides = [scores[scores["side"] == side] for side in ("top", "bottom")]
        lines = zip(*(zip(side["token"], side["score"], strict=True) for side in sides), strict=True)
        rows = [
            (rank, visible(up), number_text(raised), visible(down), number_text(lowered))
            for rank, ((up, raised), (down, lowered)) in enumerate(lines, start=1)
        ]
        print_table(str(value), ("rank", "promotes", "score", "demotes", "score"), rows)


@app.command()
@grouped
def search(
    words: Words, model: ModelOptions, reading: ReadOptions, among: AmongTop = 30, limit: Most = 20
) -> None:
    """Find the value vectors that have a word among their top tokens; of several words, most first."""
    from matlens.ffn.projection import values_with_tokens
    from matlens.models.vocabulary import word_tokens

    catalogue = model.catalogue()
    values, projection = catalogue.values, reading.projection(catalogue)
    word_tokens(projection.tokenizer, words)  # before the work, not after it
    tokens = catalogue.top_tokens(values, projection, reading=reading.read.value, k=among)
    matches = values_with_tokens(values, projection, tokens, words)
    if matches.empty:
        print_line(
            f"No value vector has {', '.join(words)} among its {among} top tokens. A larger --among may help."
        )
        return
    title = f"{len(matches):,} of {len(values):,} value vectors, by words, rank and score"
    first = matches.head(limit)
    texts = top_texts(projection, values.vectors(first["value"]), reading.tokens)
    lines = zip(first["value"], first["words"], first["rank"], first["score"], texts, strict=True)
    rows = [(name, n, rank, number_text(score), text) for name, n, rank, score, text in lines]
    print_table(title, ("value", "words", "rank", "score", "top tokens"), rows)


@app.command()
@grouped
def promoting(words: Words, model: ModelOptions, reading: ReadOptions, limit: Most = 20) -> None:
    """Find the value vectors that raise the odds of a word, or of several, most over other tokens'."""
    from matlens.ffn.projection import values_promoting

    catalogue = model.catalogue()
    values, projection = catalogue.values, reading.projection(catalogue)
    lifts = values_promoting(values, projection, words, n=min(limit, len(values)))
    texts = top_texts(projection, values.vectors(lifts["value"]), reading.tokens)
    lines = zip(lifts["value"], lifts["score"], lifts["lift"], texts, strict=True)
    rows = [(name, number_text(score), number_text(lift), text) for name, score, lift, text in lines]
    print_table(
        "By lift, the score above the mean of all tokens", ("value", "score", "lift", "top tokens"), rows
    )


@app.command()
@grouped
def cluster(
    model: ModelOptions,
    reading: ReadOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Value vectors, such as L3D12, whose clusters to show.", show_default=False),
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters.")] = 10_000,
    linkage: LinkageOption = LinkageChoice.average,
    memory: Memory = 4.0,
    disk: Disk = 0.0,
    limit: Annotated[int, typer.Option(min=1, help="Without names, show so many, the largest.")] = 20,
    out: Out = Path("out"),
) -> None:
    """Cluster all value vectors by their cosines, and show the largest clusters or those of value vectors.

    The clusters are kept in the output folder, so that the next call has them.
    """
    from matlens.ffn.clusters import cluster_table
    from matlens.ffn.values import ValueVector
    from matlens.study.study import Study

    for name in names or ():  # before the model, which can take minutes
        ValueVector.parse(name)
    catalogue = model.catalogue()
    study = Study(load_model=lambda: catalogue.model, load_values=lambda: catalogue.values, out=out)
    values = study.values
    asked = [values.resolve(name) for name in names or ()]  # and before the work
    projection = reading.projection(catalogue)
    fitted = study.clusters(clusters, linkage=linkage.value, memory=memory, disk=disk)
    chosen = fitted.holding(values, asked) if asked else list(range(min(limit, len(fitted))))
    table = cluster_table(values, projection, fitted, chosen, n_tokens=reading.tokens)
    exact = fitted.method == "exact"
    how = f"exactly, by {fitted.linkage} linkage" if exact else "by near neighbours"
    title = f"{len(values):,} value vectors in {len(fitted):,} clusters, {how}"
    cells = table.assign(
        layers=[
            _layers(first, last)
            for first, last in zip(table["first_layer"], table["last_layer"], strict=True)
        ],
        cosine=[_cosine(cosine) for cosine in table["cosine"]],
        members=[_members(members, [str(vector) for vector in asked]) for members in table["members"]],
    )
    rows = cells[["cluster", "size", "layers", "cosine", "members", "tokens"]].to_numpy().tolist()
    print_table(title, ("cluster", "size", "layers", "cosine", "vectors", "top tokens of their mean"), rows)


def _layers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _cosine(cosine: float) -> str:
    return "–" if cosine != cosine else number_text(cosine, 2)


def _members(names: str, asked: Sequence[str]) -> str:
    """Those that were asked for, and then a few others."""
    members = names.split()
    named = [name for name in members if name in asked]
    shown = [*named, *(name for name in members if name not in asked)][: max(_N_NAMED, len(named))]
    more = f" +{len(members) - len(shown)}" if len(shown) < len(members) else ""
    return " ".join(shown) + more


app.command("explore")(explore_values)
