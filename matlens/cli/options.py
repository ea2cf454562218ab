"""Options that the commands and the analyses share, each as typer reads it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class PositionChoice(StrEnum):
    """Which tokens of a training sentence give samples."""

    auto = "auto"
    drawn = "drawn"
    all = "all"


class ReadChoice(StrEnum):
    """What a vector goes through before it is read in the vocabulary."""

    plain = "plain"
    norm = "norm"
    head = "head"


class LinkageChoice(StrEnum):
    """How far apart two clusters are."""

    average = "average"
    complete = "complete"


class StackChoice(StrEnum):
    """Which stack of an encoder-decoder is read."""

    encoder = "encoder"
    decoder = "decoder"


class DtypeChoice(StrEnum):
    """Precision that the model runs in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def folder_of(text: str | Path) -> Path:
    """A folder; an empty word, such as a variable of the shell that is not set, is not where one is now.

    A ``~`` is the user's folder, as with models and corpora: shells leave it alone in ``--out=~/here``.
    """
    if not str(text).strip():
        raise typer.BadParameter("it is empty. Expected the path of a folder; '.' for this one.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise typer.BadParameter(f"{error} Expected the path of a folder.") from error


Model = Annotated[
    str,
    typer.Option(
        "--model", help="Hub name, Hugging Face folder, .gguf file, .pt file of a WikiLM, or smollm2-135m."
    ),
]
CorpusName = Annotated[
    str,
    typer.Option(
        "--corpus",
        help="wikipedia-sample, news-sample, messages-de (and other languages), a text file with one "
        "sentence a line, a .jsonl file, a Leipzig corpus, or a dataset id (name or name:config).",
    ),
]
Models = Annotated[list[str], typer.Option("--model", help="Like --model elsewhere; give it once for each.")]
Corpora = Annotated[
    list[str], typer.Option("--corpus", help="Like --corpus elsewhere; give it once for each.")
]
Field = Annotated[str, typer.Option(help="Where the text is in JSON lines and datasets.")]
Split = Annotated[str, typer.Option(help="Which split of a dataset to read.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read no more sentences of the corpus than this.")]
Patched = Annotated[
    int,
    typer.Option("--patched", min=2, help="Validation sentences that the patched model is run on."),
]
Memory = Annotated[
    float, typer.Option(min=0, help="Most GiB that exact clusters may take; past it, by near neighbours.")
]
Disk = Annotated[
    float, typer.Option(min=0, help="Most GiB of disk that exact clusters may take where memory has no room.")
]
LinkageOption = Annotated[
    LinkageChoice,
    typer.Option("--linkage", help="Of exact clusters; complete is what the authors of paper B have."),
]
Out = Annotated[
    Path,
    typer.Option("--out", parser=folder_of, metavar="FOLDER", help="Folder for everything that is written."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="Random seed of the split and of the positions.")
]
Special = Annotated[
    bool, typer.Option("--draw-special/--skip-special", help="May the position fall on [CLS] and the like?")
]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens in a batch; by default what suits the device.")
]
KeepRows = Annotated[
    bool,
    typer.Option(
        "--keep-rows/--stream",
        help="Keep vectors of all positions on disk, or only what fits need of them; 'collect' keeps them.",
    ),
]
Shard = Annotated[
    str, typer.Option("--shard", metavar="K/N", help="Which part of the training sentences, such as 3/8.")
]
Shards = Annotated[
    list[Path], typer.Argument(help="Folders that 'matlens shard' has written.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps; by default the best there is.")]
Dtype = Annotated[DtypeChoice, typer.Option(help="Precision of the model; fits are in float64 anyway.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")]
StackOption = Annotated[
    StackChoice | None,
    typer.Option("--stack", help="Of an encoder-decoder such as T5, the stack whose stream is read."),
]
PositionsOption = Annotated[
    PositionChoice,
    typer.Option(
        "--positions",
        help="One drawn token of each training sentence, or all of them. auto: drawn, as in the paper, or "
        "all where there are fewer sentences than twice the width of the model.",
    ),
]
PairsOption = Annotated[
    str, typer.Option("--pairs", help="all, last, or a list such as 0:12,6:12 (negative: from the end).")
]
Intercept = Annotated[bool, typer.Option("--intercept", help="Fit a bias too. The paper does not.")]
Ridge = Annotated[
    float | None,
    typer.Option(
        min=0,
        show_default="0, or a penalty that suits where samples are fewer than twice the width",
        help="Penalty on the maps. The paper has none.",
    ),
]
Folder = Annotated[
    Path,
    typer.Argument(
        parser=folder_of,
        metavar="FOLDER",
        help="The --out folder of 'matlens collect' or 'matlens run'.",
        show_default=False,
    ),
]
Title = Annotated[str | None, typer.Option("--title", help="Title of the figures, instead of their own.")]
Suffix = Annotated[
    str, typer.Option("--suffix", help="Put behind the names of tables and figures, such as _bert.")
]
Dominant = Annotated[int, typer.Option(min=1, help="How many sub-updates count as dominant.")]
Read = Annotated[
    ReadChoice,
    typer.Option(
        "--read",
        help="plain: E v, as in the paper. norm: through the final norm first. head: through the gain of the "
        "final norm, and in masked-LM models the dense layer of the head.",
    ),
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


TRAIN, VAL = 3000, 1000
"""Sentences of a command that answers within minutes; the paper has 9,000 and 3,000."""


def train(default: int, more: str = "") -> Any:
    """The option ``--train``; without it there are ``default`` sentences, or fewer of a small corpus."""
    return _size("--train", f"Sentences that maps are fitted on.{more}", 1, default)


def val(default: int) -> Any:
    """The option ``--val``; without it there are ``default`` sentences, or fewer of a small corpus."""
    return _size("--val", "Other sentences that the maps are evaluated on.", 2, default)


def sentences(fewest: int, default: int) -> Any:
    """The option ``--sentences``, of which there must be so many; fewer of a small corpus without it."""
    return _size("--sentences", "How many sentences to run.", fewest, default)


def _size(name: str, described: str, fewest: int, default: int) -> Any:
    """An option that tells what the user gave from a default, which gives way to a small corpus."""
    shown = f"{default}, or fewer of a small corpus"
    return Annotated[int | None, typer.Option(name, min=fewest, help=described, show_default=shown)]


Train = train(TRAIN, " The paper has 9000, and --val 3000: three times the work, and better maps.")
Val = val(VAL)
REPORT_TRAIN, REPORT_VAL = 1000, 500
ReportTrain = train(REPORT_TRAIN, " The published table has 4000, --val 1000, tuned and jacobian: an hour.")
ReportVal = val(REPORT_VAL)
