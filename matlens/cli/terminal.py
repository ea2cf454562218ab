"""What the commands about feed-forward layers share: options, loading, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from matlens.cli.options import DtypeChoice

if TYPE_CHECKING:
    from matlens.ffn.projection import Projection


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


def load_model(
    model: str, device: str | None, dtype: DtypeChoice, revision: str | None, trust_remote_code: bool
) -> Any:
    """Load a model as the options say."""
    import torch

    from matlens.models.loading import load

    return load(
        model,
        device=device,
        dtype=getattr(torch, dtype),
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


def projection_of(model: Any, read: ReadChoice) -> Projection:
    """How vectors of a model are read in the vocabulary."""
    from matlens.ffn.projection import Projection

    return Projection.from_model(model) if read == ReadChoice.plain else Projection.after_norm(model)


def top_texts(projection: Projection, vectors: Any, k: int) -> list[str]:
    """The top tokens of vectors, as people see them, a line for each."""
    from matlens.models.vocabulary import token_texts, visible

    ids = projection.top(vectors, k).ids
    return [", ".join(map(visible, token_texts(projection.tokenizer, own))) for own in ids]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of which all columns but the last keep their width."""
    table = Table(*columns, title=escape(title), title_justify="left")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)
