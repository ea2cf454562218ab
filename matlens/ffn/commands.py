"""Commands about feed-forward layers: value vectors shown and searched, updates of a prompt taken apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from matlens.errors import InputError
from matlens.options import Device, Dtype, DtypeChoice, Model, Revision, Trust

if TYPE_CHECKING:
    from matlens.examples import Examples
    from matlens.ffn.projection import Projection

app = typer.Typer(help="Value vectors of feed-forward layers, read in the vocabulary.", no_args_is_help=True)


class ReadChoice(StrEnum):
    """What a vector goes through before it is read in the vocabulary."""

    plain = "plain"
    norm = "norm"


Read = Annotated[
    ReadChoice,
    typer.Option("--read", help="plain: E v, as in the paper. norm: through the final norm first."),
]
TopTokens = Annotated[int, typer.Option("--tokens", min=1, help="How many tokens to show of each vector.")]
AmongTop = Annotated[
    int, typer.Option("--among", min=1, help="How many top tokens of each vector to search.")
]
Most = Annotated[int, typer.Option("--limit", min=1, help="Show no more value vectors than this.")]
Words = Annotated[
    list[str],
    typer.Argument(
        help="Words of one token each; write a leading space as ␣ or in quotes.", show_default=False
    ),
]


@app.command()
def show(
    names: Annotated[list[str], typer.Argument(help="Value vectors, such as L3D12.", show_default=False)],
    model: Model,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show the tokens that value vectors promote and demote most, with their scores."""
    from matlens.ffn.projection import token_table
    from matlens.ffn.values import Value, Values
    from matlens.tokens import shown

    for name in names:  # before the model, which can take minutes
        Value.parse(name)
    loaded = _load(model, device, dtype, revision, trust_remote_code)
    found = token_table(Values(loaded), _projection(loaded, read), names, k=tokens)
    for value, own in found.groupby("value", sort=False):
        columns = [own[own["side"] == side] for side in ("top", "bottom")]
        lines = zip(*(zip(one["token"], one["score"], strict=True) for one in columns), strict=True)
        rows = [
            (rank, shown(up), f"{raised:.3f}", shown(down), f"{lowered:.3f}")
            for rank, ((up, raised), (down, lowered)) in enumerate(lines, start=1)
        ]
        _print(str(value), ("rank", "promotes", "score", "demotes", "score"), rows)


@app.command()
def search(
    words: Words,
    model: Model,
    among: AmongTop = 30,
    limit: Most = 20,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Find the value vectors that have a word among their top tokens; of several words, most first."""
    from matlens.ffn.projection import holding, top_of_all
    from matlens.ffn.values import Values
    from matlens.ffn.words import word_tokens

    loaded = _load(model, device, dtype, revision, trust_remote_code)
    values, projection = Values(loaded), _projection(loaded, read)
    word_tokens(projection.tokenizer, words)  # before the work, not after it
    found = holding(values, projection, top_of_all(values, projection, k=among), words)
    if found.empty:
        print(
            f"No value vector has {', '.join(words)} among its {among} top tokens. A larger --among may help."
        )
        return
    title = f"{len(found):,} of {len(values):,} value vectors, by words, rank and score"
    part = found.head(limit)
    texts = _top_texts(projection, values.vectors(part["value"]), tokens)
    lines = zip(part["value"], part["words"], part["rank"], part["score"], texts, strict=True)
    rows = [(name, n, rank, f"{score:.3f}", text) for name, n, rank, score, text in lines]
    _print(title, ("value", "words", "rank", "score", "top tokens"), rows)


@app.command()
def promoting(
    words: Words,
    model: Model,
    limit: Most = 20,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Find the value vectors that raise the odds of a word, or of several, most over other tokens'."""
    from matlens.ffn import projection as of_vectors
    from matlens.ffn.values import Values

    loaded = _load(model, device, dtype, revision, trust_remote_code)
    values, projection = Values(loaded), _projection(loaded, read)
    found = of_vectors.promoting(values, projection, words, n=min(limit, len(values)))
    texts = _top_texts(projection, values.vectors(found["value"]), tokens)
    lines = zip(found["value"], found["score"], found["lift"], texts, strict=True)
    rows = [(name, f"{score:.3f}", f"{lift:.3f}", text) for name, score, lift, text in lines]
    _print("By lift, the score above the mean of all tokens", ("value", "score", "lift", "top tokens"), rows)


def update(
    prompt: Annotated[str, typer.Argument(help="A text; for masked-LM models with one mask in it.")],
    model: Model,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="A layer whose dominant sub-updates to show; give it once for each."),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(help="Which token, from 0 (negative: from the end); by default the last, or the mask."),
    ] = None,
    dominant: Annotated[int, typer.Option(min=1, help="How many sub-updates count as dominant.")] = 10,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Take apart what the FFNs write for a prompt: the dominant sub-updates and the tokens they promote.

    Without --layer there is a line for each layer, with its greatest sub-update.
    """
    from matlens.examples import make_prompts
    from matlens.ffn.updates import Updates, dominant_table
    from matlens.ffn.words import token_texts
    from matlens.tokens import shown

    loaded = _load(model, device, dtype, revision, trust_remote_code)
    projection = _projection(loaded, read)
    examples = _at(make_prompts(loaded, [prompt]), position)
    updates = Updates.of(loaded, examples, layer or None, progress=False)
    place = int(examples.positions[0])
    (token,) = token_texts(loaded.tokenizer, examples.tokens[[place]])
    at = f"{prompt}\nAt token {place}, '{shown(token)}'"
    found = dominant_table(updates, projection, k=dominant, n_tokens=tokens)
    shares = found.groupby("layer")["share"].sum().to_dict()
    if layer is None:
        first = found[found["rank"] == 1]
        title = f"{at}: the greatest sub-update of each layer, and the share of the {dominant} greatest"
        rows = [(one.layer, f"{shares[one.layer]:.1%}", *_told(one)) for one in first.itertuples()]
        _print(title, ("layer", f"{dominant} greatest", "value", "coefficient", "share", "tokens"), rows)
        return
    for number, own in found.groupby("layer"):
        title = f"{at}, layer {number}: these are {own['share'].sum():.1%} of all contributions"
        rows = [(one.rank, *_told(one)) for one in own.itertuples()]
        _print(title, ("rank", "value", "coefficient", "share", "tokens"), rows)


def _told(one: Any) -> tuple[str, ...]:
    return one.value, f"{one.coefficient:.3f}", f"{one.share:.1%}", one.tokens


def _load(
    model: str, device: str | None, dtype: DtypeChoice, revision: str | None, trust_remote_code: bool
) -> Any:
    import torch

    from matlens.models import load

    return load(
        model,
        device=device,
        dtype=getattr(torch, dtype),
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


def _projection(model: Any, read: ReadChoice) -> Projection:
    from matlens.ffn.projection import Projection

    return Projection.of(model) if read == ReadChoice.plain else Projection.after_norm(model)


def _at(examples: Examples, position: int | None) -> Examples:
    if position is None:
        return examples
    length = len(examples.tokens)
    if not -length <= position < length:
        raise InputError(f"Position {position} is out of range: the prompt has the tokens 0 to {length - 1}.")
    return replace(examples, positions=examples.positions * 0 + position % length)


def _top_texts(projection: Projection, vectors: Any, k: int) -> list[str]:
    from matlens.ffn.words import token_texts
    from matlens.tokens import shown

    ids = projection.top(vectors, k).ids
    return [", ".join(map(shown, token_texts(projection.tokenizer, own))) for own in ids]


def _print(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(*columns, title=escape(title), title_justify="left")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)
