"""Options of the commands and of the analyses, each declared once, and groups of them.

A parameter of a command that is annotated with one of the dataclasses becomes their fields on the command
line. Every command loads its model and its corpus through them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from matlens.errors import InputError, check_int, short
from matlens.parallel import waiting

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.data.corpus import Corpus
    from matlens.ffn.catalogue import Catalogue
    from matlens.ffn.projection import Projection
    from matlens.linear.pairs import Pairs
    from matlens.study.study import Study

Dtype = Literal["float32", "bfloat16", "float16"]
PositionChoice = Literal["auto", "drawn", "all"]
LinkageChoice = Literal["average", "complete"]
_ABOUT_THE_WORK = {"device", "out", "batch_tokens", "keep_rows"}  # and nothing that comes out of it


def folder_of(text: str | Path) -> Path:
    """A folder; an empty word, such as a variable of the shell that is not set, is not the current one.

    A ``~`` is the user's folder, as with models and corpora: shells leave it alone in ``--out=~/here``.
    """
    if not str(text).strip():
        raise typer.BadParameter("it is empty. Expected the path of a folder; '.' for this one.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise typer.BadParameter(f"{error} Expected the path of a folder.") from error


def listed(text: str | None) -> list[str] | None:
    """Names with a comma between."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def numbered(text: str | None) -> list[int] | None:
    """Layers with a comma between."""
    try:
        return None if text is None else [int(name) for name in listed(text) or []]
    except ValueError:
        raise InputError(f"The layers are {text!r}. Expected numbers with a comma between.") from None


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
    int, typer.Option(min=0, max=2**32 - 1, help="Random seed of the split and of the positions.")
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
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps; by default the best there is.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")]
Stack = Annotated[
    Literal["encoder", "decoder"] | None,
    typer.Option("--stack", help="Of an encoder-decoder such as T5, the stack whose stream is read."),
]
PairsOption = Annotated[
    str, typer.Option("--pairs", help="all, last, or a list such as 0:12,6:12 (negative: from the end).")
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
Prompt = Annotated[
    str, typer.Argument(help="A text; for masked-LM models with one mask in it.", show_default=False)
]
Dominant = Annotated[int, typer.Option(min=1, help="How many sub-updates count as dominant.")]

TRAIN, VAL = 3000, 1000
"""Sentences of a command that answers within minutes; the paper has 9,000 and 3,000."""
REPORT_TRAIN, REPORT_VAL = 1000, 500


def size_option(name: str, described: str, fewest: int, default: int) -> Any:
    """An option that tells what the user gave from a default, which gives way to a small corpus."""
    return typer.Option(
        name, min=fewest, help=described, show_default=f"{default}, or fewer of a small corpus"
    )


OF_TRAIN, OF_VAL = "Sentences that maps are fitted on.", "Other sentences that the maps are evaluated on."
_PAPER = " The paper has 9000, and --val 3000: three times the work, and better maps."
_PUBLISHED = " The published table has 4000, --val 1000, tuned and jacobian: an hour."
Train = Annotated[int | None, size_option("--train", OF_TRAIN + _PAPER, 1, TRAIN)]
Val = Annotated[int | None, size_option("--val", OF_VAL, 2, VAL)]
ReportTrain = Annotated[int | None, size_option("--train", OF_TRAIN + _PUBLISHED, 1, REPORT_TRAIN)]
ReportVal = Annotated[int | None, size_option("--val", OF_VAL, 2, REPORT_VAL)]


def sizes_of(
    train: int | None, val: int | None, *, default_train: int = TRAIN, default_val: int = VAL
) -> dict[str, Any]:
    """Sizes of a study, as its arguments: what the user gave is kept, and a default gives way if it must."""
    sizes = {"train": train, "validation": val}
    return {
        "n_train": default_train if train is None else train,
        "n_validation": default_val if val is None else val,
        "adjustable": tuple(part for part, size in sizes.items() if size is None),
    }


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Model
    device: Device = None
    dtype: Annotated[Dtype, typer.Option(help="Precision of the model; fits are in float64 anyway.")] = (
        "float32"
    )
    revision: Revision = None
    trust_remote_code: Trust = False
    stack: Stack = None

    def check(self) -> None:
        """Refuse a name that there is no model of, or a device that is not there, before any work."""
        from matlens.models.places import locate

        locate(self.model, self.revision)
        if self.device is not None:
            from matlens.models.loading import choose_device

            choose_device(self.device)

    def _loading(self) -> dict[str, Any]:
        import torch

        return {
            "device": self.device, "dtype": getattr(torch, self.dtype), "revision": self.revision,
            "trust_remote_code": self.trust_remote_code, "stack": self.stack,
        }  # fmt: skip

    def catalogue(self) -> Catalogue:
        """What is read of the model's weights, without the model where that is known."""
        with waiting("looking for the model"):
            from matlens.ffn.catalogue import Catalogue

            return Catalogue(self.model, **self._loading())

    def load(self) -> TransformerBridge:
        """Load the model."""
        with waiting("loading the model"):
            from matlens.models.loading import load

            return load(self.model, **self._loading())


@dataclass(frozen=True)
class CorpusOptions:
    """Which corpus, and what is read of it."""

    corpus: CorpusName
    field: Annotated[str, typer.Option(help="Where the text is in JSON lines and datasets.")] = "text"
    split: Annotated[str, typer.Option(help="Which split of a dataset to read.")] = "train"
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read no more sentences of the corpus than this.")
    ] = None

    def load(self) -> Corpus:
        """Read the sentences."""
        with waiting("reading the corpus"):
            from matlens.data.corpus import load_corpus

            return load_corpus(self.corpus, field=self.field, split=self.split, limit=self.limit)

    def _described(self) -> Corpus:
        sentences = self.load()
        print(sentences.report())
        return sentences

    def parts(self, train: int | None, val: int | None, seed: int, **defaults: int) -> tuple[Corpus, Corpus]:
        """Read the sentences and split them; a small corpus has fewer than the defaults in each part."""
        from matlens.study.plan import fitting_sizes

        sentences = self._described()
        n_train, n_validation = fitting_sizes(len(sentences), *sizes_of(train, val, **defaults).values())
        return sentences.split(n_train=n_train, n_validation=n_validation, seed=seed)

    def tenth(self, seed: int = 0) -> tuple[Corpus, Corpus]:
        """Read the sentences: nine tenths to fit on, and the rest, two at least, to evaluate on."""
        sentences = self._described()
        n_judged = max(2, len(sentences) // 10)
        return sentences.split(n_train=len(sentences) - n_judged, n_validation=n_judged, seed=seed)


@dataclass(frozen=True)
class SampleOptions:
    """How many sentences are run, which tokens give samples, and where the vectors are written."""

    out: Out
    train: Train = None
    val: Val = None
    seed: Seed = 0
    positions: Annotated[
        PositionChoice,
        typer.Option(
            "--positions",
            help="One drawn token of each training sentence, or all of them. auto: drawn, as in the paper, "
            "or all where there are fewer sentences than twice the width of the model.",
        ),
    ] = "auto"
    draw_special: Annotated[
        bool,
        typer.Option("--draw-special/--skip-special", help="May the position fall on [CLS] and the like?"),
    ] = True
    batch_tokens: BatchTokens = None
    keep_rows: KeepRows = False

    def study(self, model: ModelOptions, corpus: CorpusOptions, **more: Any) -> Study:
        """The study whose main folder is the output folder; the corpus is read and described."""
        if not self.draw_special and self.positions == "all":
            raise InputError(
                "All positions include the special tokens: --skip-special is for drawn positions."
            )
        model.check()
        sentences = corpus.load()  # before imports that take seconds
        print(sentences.report())
        from matlens.study.study import Study

        return Study(
            load_model=model.load, load_corpus=lambda: sentences, out=self.out, main_folder=self.out,
            **sizes_of(self.train, self.val), seed=self.seed, positions=self.positions,
            draw_special=self.draw_special, batch_tokens=self.batch_tokens, keep_rows=self.keep_rows, **more,
        )  # fmt: skip


@dataclass(frozen=True)
class FitOptions:
    """Which maps are fitted, and how."""

    pairs: PairsOption = "all"
    intercept: Annotated[bool, typer.Option("--intercept", help="Fit a bias too. The paper does not.")] = (
        False
    )
    ridge: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default="0, or a penalty that suits where samples are fewer than twice the width",
            help="Penalty on the maps. The paper has none.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `fit_maps`."""
        return {"pairs": _pairs(self.pairs), "intercept": self.intercept, "ridge": self.ridge}


@dataclass(frozen=True)
class ReadOptions:
    """How vectors are read in the vocabulary."""

    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="How many tokens to show of each vector.")
    ] = 10
    read: Annotated[
        Literal["plain", "norm", "head"],
        typer.Option(
            "--read",
            help="plain: E v, as in the paper. norm: through the final norm first. head: through the gain "
            "of the final norm, and in masked-LM models the dense layer of the head.",
        ),
    ] = "plain"

    def projection(self, catalogue: Catalogue) -> Projection:
        """How vectors of the model are read."""
        projection = catalogue.projection(self.read)
        most = len(projection.unembedding)
        check_int(self.tokens, "The number of tokens", min=1, max=most)  # before the work
        return projection


def asked(**groups: Any) -> dict[str, dict[str, Any]]:
    """Those of the options that decide what comes out, by group and name."""
    return {
        name: {key: value for key, value in asdict(group).items() if key not in _ABOUT_THE_WORK}
        for name, group in groups.items()
    }


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a command, which has the options of the groups among its parameters."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(name)(_grouped(function))
        return function

    return register


def _grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _options_of(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(function)
    def run(**given: Any) -> Any:
        arguments = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**arguments, **given)

    parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)
    return with_signature(run, parameters)


def _options_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name, Parameter.KEYWORD_ONLY, annotation=hints[field.name],
            default=Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
    ]  # fmt: skip


def with_signature(function: Callable[..., Any], parameters: Iterable[Parameter]) -> Callable[..., Any]:
    """Give a function that takes anything by name the parameters that typer is to see."""
    named = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return function


def _pairs(text: str) -> Pairs:
    if text == "all":
        return "all"
    if text == "last":
        return "last"
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return [(int(source), int(target)) for source, target in pairs]
    except ValueError:
        shown = text if 0 < len(text) <= 40 else short(text)
        raise InputError(f"--pairs {shown}: expected all, last, or a list such as 0:12,6:12.") from None
