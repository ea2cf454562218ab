"""Commands from functions: help from docstrings, limits and choices from annotations.

A parameter that is annotated with a dataclass becomes its fields on the command line. Positional-only
parameters become arguments. An option that a docstring does not describe has the help of `SHARED`, or of the
field of that name in a group of options.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from inspect import Parameter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from matlens.errors import Between, NonNegative, PositiveInt, Seed, printable, short
from matlens.parallel import waiting

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.data.corpus import Corpus
    from matlens.ffn.catalogue import Catalogue
    from matlens.lens.lens import Lens
    from matlens.study.study import Study

Dtype = Literal["float32", "bfloat16", "float16"]
PositionChoice = Literal["auto", "sampled", "all"]
LinkageChoice = Literal["average", "complete"]
Sizes = tuple[int | None, int | None]  # of the training and validation sentences; None for the default
SHARED = {
    "folder": "The --out folder of 'matlens collect' or 'matlens run'.",
    "layers": "Layers with a comma between, by default all.",
    "prompt": "A text; for masked-LM models with one mask in it.",
    "chat": "Read the prompt as a user's message, through the tokenizer's chat template.",
    "names": "Value vectors, such as L3D12.",
    "words": "Words of one token each; write a leading space as ␣ or in quotes.",
    "limit": "Show no more value vectors than this.",
    "dominant": "How many sub-updates count as dominant.",
    "lens": "A folder of 'matlens lens fit'; or id, the logit lens, which needs no fit.",
    "repository": "A repository of the hub, such as someone/lenses.",
    "prompts": "Sentences that Jacobians are taken on, the longest.",
}
"""Help of shared options."""
TRAIN, VAL = 3000, 1000
"""Default sentences, for minutes of work; the paper has 9,000 and 3,000."""


def as_prompt(text: str, *, chat: bool) -> str | list[dict[str, str]]:
    """A prompt, or with ``chat`` a conversation of one message."""
    return [{"role": "user", "content": text}] if chat else text


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a command; it can be called as before."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        signature, hints = inspect.signature(function), get_type_hints(function)
        groups: dict[str, Any] = {
            each: hints[each] for each in signature.parameters if is_dataclass(hints[each])
        }

        @wraps(function)
        def run(**given: Any) -> Any:
            for parameter, group in groups.items():
                given[parameter] = group(**{field.name: given.pop(field.name) for field in fields(group)})
            if CorpusOptions in groups.values():
                given["model"].check_name()  # before the corpus is read
            bound = inspect.BoundArguments(signature, given)
            return function(*bound.args, **bound.kwargs)

        app.command(name, help=documented(function)[0])(with_signature(run, options_of(function)))
        return function

    return register


def options_of(function: Any, *, but: Sequence[str] = ()) -> list[Parameter]:
    """Parameters of a function or fields of a dataclass, annotated for typer."""
    hints, (_, helps) = get_type_hints(function, include_extras=True), documented(function)
    options: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, str)
        if name in but:
            continue
        if is_dataclass(hint):
            options += options_of(hint)
        else:
            kind, notes = _without_notes(hint)
            info = _info(parameter, kind, notes)
            info.help = info.help or helps.get(name) or _shared_help().get(name)
            kind = Any if info.parser else kind  # typer does not support all unions
            options.append(parameter.replace(annotation=Annotated[kind, info], kind=Parameter.KEYWORD_ONLY))
    return sorted(options, key=lambda option: option.default is not Parameter.empty)


def _info(parameter: Parameter, kind: Any, notes: list[Any]) -> Any:
    info: Any = copy(next((note for note in notes if isinstance(note, ParameterInfo)), _PARSED.get(kind)))
    if info is None and parameter.kind is Parameter.POSITIONAL_ONLY:
        info = typer.Argument(show_default=False)
    elif info is None:
        name = parameter.name.replace("_", "-")
        info = typer.Option(f"--{name}/--no-{name}" if parameter.default is True else f"--{name}")
    for bounds in (note for note in notes if isinstance(note, Between)):
        info.min = None if bounds.min == -math.inf else bounds.min
        info.max = None if bounds.max == math.inf else bounds.max
    if Path in (kind, *get_args(kind)):
        info.metavar = "PATH" if isinstance(info, OptionInfo) else parameter.name.upper()
    return info


def _without_notes(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and the annotations."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        plain, more = _without_notes(kind)
        return plain, [*notes, *more]
    if get_origin(hint) in (Union, UnionType):
        parts = [_without_notes(part) for part in get_args(hint)]
        return Union[tuple(part for part, _ in parts)], [note for _, notes in parts for note in notes]  # noqa: UP007
    return hint, []


def documented(function: Any) -> tuple[str, dict[str, str]]:
    """A docstring's text before its parameters, and the text of each parameter."""
    summary, *sections = re.split(r"\n\n(?:Parameters|Attributes)\n-+\n", inspect.getdoc(function) or "")
    helps: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", "\n".join(sections)):
        names, _, text = entry.partition("\n")
        helps |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return summary, helps


def with_signature(function: Callable[..., Any], parameters: list[Parameter]) -> Callable[..., Any]:
    """Give a ``**kwargs`` function the signature that typer reads."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


# Options that are read from a text


def parsed(read: Callable[[str], Any], metavar: str, form: str) -> OptionInfo:
    """An option that a function reads; for a text that it cannot read, the error says the valid form."""

    def parse(text: Any) -> Any:
        try:
            return read(text)
        except ValueError:
            raise typer.BadParameter(f"must be {form}, got {short(text)}.") from None

    return typer.Option(parser=parse, metavar=metavar)


def _read_pairs(text: str) -> Any:
    if text in ("all", "last"):
        return text
    pairs = [pair.split(":") for pair in text.split(",")]
    return [(int(source), int(target)) for source, target in pairs]


PairsOption = Annotated[Any, parsed(_read_pairs, "PAIRS", "all, last or a list as 0:12,6:12")]
Layers = Annotated[
    Any, parsed(lambda text: list(map(int, text.split(","))), "LAYERS", "a list such as 0,12,29")
]
KeepRows = Annotated[bool, typer.Option("--keep-rows/--stream")]
_PARSED: dict[Any, OptionInfo] = {
    Union[float, Literal["loo"]]: parsed(  # noqa: UP007
        lambda text: "loo" if text == "loo" else float(text), "FLOAT|loo", "a number or loo"
    )
}


# Groups of options


@cache
def _shared_help() -> dict[str, str]:
    """The help of shared options, and of the fields of all groups, by name."""
    groups = (ReadOptions, FitOptions, SampleOptions, CorpusOptions, ModelOptions)
    return {name: text for group in groups for name, text in documented(group)[1].items()} | SHARED


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how to load it.

    Attributes
    ----------
    model
        Hub name, Hugging Face folder, .gguf file, .pt file of a WikiLM, or smollm2-135m.
    device
        cpu, cuda or mps; by default the best available.
    dtype
        Precision of the model; fits are always in float64.
    revision
        Branch, tag or commit of a model on the hub.
    trust_remote_code
        Execute code of the model's repository.
    stack
        Stack of an encoder-decoder such as T5.
    """

    model: str
    device: str | None = None
    dtype: Dtype = "float32"
    revision: str | None = None
    trust_remote_code: bool = False
    stack: Literal["encoder", "decoder"] | None = None

    def _loading(self) -> dict[str, Any]:
        import torch

        options = asdict(self)
        return {"name": options.pop("model"), **options, "dtype": getattr(torch, self.dtype)}

    def check_name(self) -> None:
        """Raise InputError if the model cannot be found."""
        from matlens.models.places import locate

        locate(self.model, self.revision)

    def catalogue(self) -> Catalogue:
        """The value vectors of the model, without loading it where they are cached."""
        with waiting("looking for the model"):
            from matlens.ffn.catalogue import Catalogue

            return Catalogue(**self._loading())

    def load(self) -> TransformerBridge:
        """Load the model."""
        with waiting("loading the model"):
            from matlens.models.loading import load

            return load(**self._loading())


@dataclass(frozen=True)
class LensOptions:
    """A lens for the model.

    Attributes
    ----------
    lens
        A folder of 'matlens lens fit', or id for the logit lens.
    strict
        Require the model that the lens was fitted on; else another of its shape is accepted.
    """

    lens: str = "id"
    strict: bool = True

    def load(self, model: ModelOptions) -> Lens:
        """Load the model, and the lens on it."""
        bridge = model.load()
        from matlens.lens.lens import Lens

        if self.lens == "id":
            return Lens.identity(bridge)
        return Lens.load(self.lens, bridge, strict=self.strict)


@dataclass(frozen=True)
class LensesOptions:
    """Lenses for a page of the model.

    Attributes
    ----------
    lens
        A lens, or maps that 'matlens fit' has written; repeat it for several. The page opens on the first; id
        is always in it.
    strict
        Require the model that lenses and maps were fitted on; else another of its shape is accepted.
    """

    lens: list[Path] | None = None
    strict: bool = True

    def load(self, model: ModelOptions) -> tuple[TransformerBridge, list[Lens]]:
        """Load the model, and the lenses of it; the page reads all with one readout."""
        from matlens.explorer.exploration import load_lens
        from matlens.models.identity import ModelIdentity

        lenses = [load_lens(folder) for folder in self.lens or []]
        bridge = model.load()
        identity = ModelIdentity.from_model(bridge)
        return bridge, [
            replace(lens, provenance=lens.provenance.on(identity, ours="the lens", strict=self.strict))
            for lens in lenses
        ]


@dataclass(frozen=True)
class CorpusOptions:
    """The corpus, and how much of it to read.

    Attributes
    ----------
    corpus
        wikipedia-sample, news-sample, messages-de (and other languages), a text file with one sentence per
        line, a .jsonl file, a Leipzig corpus, or a dataset id (name or name:config).
    field
        Field of the text in JSON lines and datasets.
    split
        Split of a dataset.
    limit
        Maximum number of sentences to read.
    """

    corpus: str
    field: str = "text"
    split: str = "train"
    limit: PositiveInt | None = None

    def load(self) -> Corpus:
        """Read the sentences, and print their number."""
        with waiting("reading the corpus"):
            from matlens.data.corpus import load_corpus

            sentences = load_corpus(self.corpus, field=self.field, split=self.split, limit=self.limit)
        print(sentences.report())
        return sentences

    def parts(
        self, sizes: Sizes, seed: int, defaults: tuple[int, int] = (TRAIN, VAL)
    ) -> tuple[Corpus, Corpus]:
        """Read the sentences and split them, see `split_parts`."""
        return split_parts(self.load(), sizes, defaults, seed)

    def tenth(self, seed: int = 0) -> tuple[Corpus, Corpus]:
        """Read the sentences: nine tenths to fit on, and the rest, two at least, to evaluate on."""
        sentences = self.load()
        n_validation = max(2, len(sentences) // 10)
        return sentences.split(n_train=len(sentences) - n_validation, n_validation=n_validation, seed=seed)


def split_parts(corpus: Corpus, sizes: Sizes, defaults: tuple[int, int], seed: int) -> tuple[Corpus, Corpus]:
    """Training and validation sentences; where a corpus is too small, only the defaults shrink.

    Both defaults shrink in proportion; a single default shrinks to the rest.
    """
    n_train, n_val = (size or default for size, default in zip(sizes, defaults, strict=True))
    given = sum(size or 0 for size in sizes)
    rest, n = n_train + n_val - given, len(corpus)
    smaller = tuple(
        size or default * min(n - given, rest) // rest for size, default in zip(sizes, defaults, strict=True)
    )
    if smaller != (n_train, n_val) and smaller[0] >= 1 and smaller[1] >= 2:
        print(
            f"{printable(corpus.name)} has {n:,} sentences, fewer than {n_train:,}+{n_val:,} "
            f"(training+validation): it is split into {smaller[0]:,}+{smaller[1]:,}.",
            file=sys.stderr,
        )
        n_train, n_val = smaller
    return corpus.split(n_train=n_train, n_validation=n_val, seed=seed)


@dataclass(frozen=True)
class SampleOptions:
    """Number of sentences, sampled tokens, and output folder.

    Attributes
    ----------
    out
        Output folder.
    train
        Training sentences; by default 3000, or fewer of a small corpus. The paper uses --train 9000
        --val 3000: three times the work, and better maps.
    val
        Validation sentences; by default 1000, or fewer of a small corpus.
    seed
        Random seed of the split and of the positions.
    positions
        One sampled token per training sentence, or all. auto: sampled, as in the paper, or all if there are
        fewer sentences than twice the width of the model.
    sample_special
        Also sample special tokens, such as [CLS].
    batch_tokens
        Maximum tokens per batch; the default depends on the device.
    keep_rows
        Store the vectors of all positions, or only sufficient statistics; 'collect' stores them.
    """

    out: Path
    train: PositiveInt | None = None
    val: Annotated[int, Between(2)] | None = None
    seed: Seed = 0
    positions: PositionChoice = "auto"
    sample_special: Annotated[bool, typer.Option("--sample-special/--skip-special")] = True
    batch_tokens: PositiveInt | None = None
    keep_rows: KeepRows = False

    def study(self, model: ModelOptions, corpus: CorpusOptions, **more: Any) -> Study:
        """The study in the output folder."""
        from matlens.study.study import Study

        return Study(
            load_model=model.load, load_parts=lambda: corpus.parts((self.train, self.val), self.seed),
            out=self.out, seed=self.seed, positions=self.positions, sample_special=self.sample_special,
            batch_tokens=self.batch_tokens, keep_rows=self.keep_rows, **more,
        )  # fmt: skip


@dataclass(frozen=True)
class FitOptions:
    """Options of fits: the arguments of `fit_maps`.

    Attributes
    ----------
    pairs
        all, last, or a list such as 0:12,6:12 (negative: from the end).
    intercept
        Also fit a bias (not in the paper).
    ridge
        Ridge penalty; by default 0, or a suitable one if samples are fewer than twice the width. The paper
        has none.
    """

    pairs: PairsOption = "all"
    intercept: bool = False
    ridge: NonNegative | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How vectors are projected to the vocabulary.

    Attributes
    ----------
    tokens
        Number of tokens to show for each vector.
    read
        plain: E v, as in the paper. norm: through the final norm first. head: through the gain of the final
        norm, and in masked-LM models the dense layer of the head.
    """

    tokens: PositiveInt = 10
    read: Literal["plain", "norm", "head"] = "plain"
