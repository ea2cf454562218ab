"""Options that belong together, and how a command takes them as one parameter.

A parameter of a command that is annotated with one of these groups becomes the group's options on the
command line. Every command loads its model and its corpus through them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from matlens.cli import options
from matlens.cli.options import DtypeChoice, PositionChoice, ReadChoice, StackChoice
from matlens.errors import InputError, check_int, check_number, short
from matlens.parallel import waiting

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.data.corpus import Corpus
    from matlens.ffn.catalogue import Catalogue
    from matlens.ffn.projection import Projection
    from matlens.linear.pairs import Pairs
    from matlens.study.study import Study


class Group:
    """Options that belong together."""

    _ABOUT_THE_WORK: ClassVar[tuple[str, ...]] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """Those of the options that decide what comes out, by their names."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)  # type: ignore[arg-type]
            if field.name not in self._ABOUT_THE_WORK
        }


@dataclass(frozen=True)
class ModelOptions(Group):
    """Which model, and how it is loaded."""

    _ABOUT_THE_WORK = ("device",)

    model: options.Model
    device: options.Device = None
    dtype: options.Dtype = DtypeChoice.float32
    revision: options.Revision = None
    trust_remote_code: options.Trust = False
    stack: options.StackOption = None

    def check(self) -> None:
        """Refuse a name that there is no model of, or a device that is not there, before any work."""
        from matlens.models.places import locate

        locate(self.model, self.revision)
        if self.device is not None:
            from matlens.models.loading import choose_device

            choose_device(self.device)

    def check_sentences(self) -> None:
        """Refuse a decoder that needs a source for each sentence, which no corpus has, before any work."""
        if self.stack == StackChoice.decoder:
            raise InputError(
                "The decoder of an encoder-decoder reads pairs of a source and a target, and a corpus has "
                "sentences alone. Expected --stack encoder; in Python matlens.data.make_pairs makes pairs."
            )

    def _loading(self) -> dict[str, Any]:
        """How the model is loaded, in the words of `matlens.load`."""
        import torch

        return {
            "device": self.device, "dtype": getattr(torch, self.dtype), "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "stack": None if self.stack is None else self.stack.value,
        }  # fmt: skip

    def catalogue(self) -> Catalogue:
        """What is read of the model's weights, without the model where that is known."""
        self.check()  # the imports take seconds
        with waiting("looking for the model"):
            from matlens.ffn.catalogue import Catalogue

            return Catalogue(self.model, **self._loading())

    def load(self) -> TransformerBridge:
        """Load the model."""
        self.check()  # the imports take seconds
        with waiting("loading the model"):
            from matlens.models.loading import load

            return load(self.model, **self._loading())


@dataclass(frozen=True)
class CorpusOptions(Group):
    """Which corpus, and what is read of it."""

    corpus: options.CorpusName
    field: options.Field = "text"
    split: options.Split = "train"
    limit: options.Limit = None

    def load(self) -> Corpus:
        """Read the sentences."""
        with waiting("reading the corpus"):
            from matlens.data.corpus import load_corpus

            return load_corpus(self.corpus, field=self.field, split=self.split, limit=self.limit)


@dataclass(frozen=True)
class SampleOptions(Group):
    """How many sentences are run, which tokens give samples, and where the vectors are written."""

    _ABOUT_THE_WORK = ("out", "batch_tokens", "keep_rows")

    out: options.Out
    train: options.Train = None
    val: options.Val = None
    seed: options.Seed = 0
    positions: options.PositionsOption = PositionChoice.auto
    draw_special: options.Special = True
    batch_tokens: options.BatchTokens = None
    keep_rows: options.KeepRows = False

    def check(self, model: ModelOptions, fit: FitOptions | None = None) -> None:
        """Refuse options that make no sense, and an output folder that cannot be used, before any work."""
        from matlens.study.output import MAPS, MOMENTS, TRAIN, VALIDATION, check_output

        if not self.draw_special and self.positions == PositionChoice.all:
            raise InputError(
                "All positions include the special tokens: --skip-special is for drawn positions."
            )
        shared: dict[str, Any] = {"model": {"dtype": model.dtype.value}, "data": {"seed": self.seed}}
        known = {TRAIN: dict(shared), VALIDATION: dict(shared)}
        if self.positions != PositionChoice.auto:
            known[TRAIN]["positions"] = self.positions.value
        if fit is not None and self.positions != PositionChoice.drawn and not self.keep_rows:
            known[MOMENTS] = dict(known[TRAIN])
        if fit is not None:
            known[MAPS] = {**known[TRAIN], "intercept": fit.intercept}
            if fit.ridge is not None:
                known[MAPS]["ridge"] = fit.ridge
        check_output(self.out, known)
        model.check_sentences()
        model.check()
        if fit is not None:
            fit.check(model)

    def check_shard(self, model: ModelOptions, fit: FitOptions) -> None:
        """Refuse, before any work, a folder in which no shard could be written."""
        from matlens.study.output import check_shard_folder

        check_shard_folder(self.out, {"model": {"dtype": model.dtype.value}, "data": {"seed": self.seed}})
        model.check_sentences()
        model.check()
        fit.check(model)

    def study(self, model: ModelOptions, corpus: CorpusOptions, **more: Any) -> Study:
        """The study whose main folder is the output folder; the corpus is read and described."""
        sentences = corpus.load()  # before imports that take seconds
        print(sentences.report())
        from matlens.study.study import Study

        return Study(
            load_model=model.load, load_corpus=lambda: sentences, out=self.out, main_folder=self.out,
            **sizes_of(self.train, self.val), seed=self.seed, positions=self.positions.value,
            draw_special=self.draw_special, batch_tokens=self.batch_tokens, keep_rows=self.keep_rows, **more,
        )  # fmt: skip


def sizes_of(
    train: int | None,
    val: int | None,
    *,
    default_train: int = options.TRAIN,
    default_val: int = options.VAL,
) -> dict[str, Any]:
    """Sizes of a study, as its arguments: what the user gave is kept, and a default gives way if it must."""
    sizes = {"train": train, "validation": val}
    return {
        "n_train": default_train if train is None else train,
        "n_validation": default_val if val is None else val,
        "adjustable": tuple(part for part, size in sizes.items() if size is None),
    }


@dataclass(frozen=True)
class FitOptions(Group):
    """Which maps are fitted, and how."""

    pairs: options.PairsOption = "all"
    intercept: options.Intercept = False
    ridge: options.Ridge = None

    def check(self, model: ModelOptions) -> None:
        """Refuse pairs of layers that the model does not have, where that is known before it is loaded."""
        pairs = _pairs(self.pairs)
        if pairs in ("all", "last") or model.revision is not None:
            return
        from matlens.linear.pairs import resolve_pairs
        from matlens.models.places import blocks_in_configuration

        if (blocks := blocks_in_configuration(model.model)) is not None:
            resolve_pairs(pairs, blocks)

    def fit_arguments(self) -> dict[str, Any]:
        """Arguments of `fit_maps`."""
        if self.ridge is not None:
            check_number(self.ridge, "--ridge", min=0)
        return {"pairs": _pairs(self.pairs), "intercept": self.intercept, "ridge": self.ridge}


@dataclass(frozen=True)
class ReadOptions:
    """How vectors are read in the vocabulary."""

    tokens: options.TopTokens = 10
    read: options.Read = ReadChoice.plain

    def projection(self, catalogue: Catalogue) -> Projection:
        """How vectors of the model are read."""
        projection = catalogue.projection(self.read.value)
        most = len(projection.unembedding)
        check_int(self.tokens, "The number of tokens", min=1, max=most)  # before the work
        return projection


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of the groups among its parameters; those that are required come first."""
    hints = get_type_hints(command, include_extras=True)
    groups = {
        name: hints[name] for name in inspect.signature(command).parameters if is_dataclass(hints[name])
    }
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += group_parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def run(**given: Any) -> Any:
        arguments = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**arguments, **given)

    parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)
    return with_signature(run, parameters)


def group_parameters(group: Any) -> list[Parameter]:
    """The options of a group, as parameters of a function."""
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
        numbers = [[int(layer) for layer in pair.split(":")] for pair in text.split(",")]
        pairs = [(source, target) for source, target in numbers]
    except ValueError:
        shown = text if 0 < len(text) <= 40 else short(text)
        raise InputError(f"--pairs {shown}: expected all, last, or a list such as 0:12,6:12.") from None
    for source, target in pairs:
        if source >= target and (source < 0) == (target < 0):  # else it depends on the number of layers
            raise InputError(
                f"A map from layer {source} to layer {target}: the source must lie before the target."
            )
    return pairs
