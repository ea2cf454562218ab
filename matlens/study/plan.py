"""What a study takes before it runs: memory, disk and operations of each step, and what has room for it.

Everything follows from the model's shape and from counts: no weights are loaded. Files are planned to the
byte of their numbers; the memory of fits is that of the arrays that they hold at their peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from matlens.errors import InputError, PositiveInt, check_choice, check_int, checked
from matlens.io.rows import Column, file_bytes
from matlens.linear.needs import (
    collected_fit_bytes,
    moments_bytes,
    stored_fit_bytes,
    stream_widths,
    streamed_fit_bytes,
    written_moments_bytes,
)
from matlens.linear.samples import are_few
from matlens.models.images import is_visual
from matlens.models.layout import ModelLayout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PAIRS = ("last", "all")
PositionsToPlan = Literal["drawn", "all"]
PairsToPlan = Literal["last", "all"]

BATCH_TOKENS = 2048  # of a batch on a processor
SENTENCE = 30  # tokens, where nobody says how long sentences are
_MOST = 2**40
CHARACTERS = 4  # of a token of English, about
_LAYERS, _WIDTH, _VOCABULARY = 10**4, 10**6, 10**8  # more than any model has
_ROWS = 256  # distributions that are held together while maps are evaluated
_SCREENED = 1 << 24  # logits that a trace looks at together
_DOMINANT = 10
_TOP = 30


@checked
@dataclass(frozen=True, kw_only=True)
class Shape:
    """As much of a model as its costs follow from.

    Attributes
    ----------
    n_layers, d_model, d_mlp, d_vocab
        ``L``, the width of the stream, the coefficients of an FFN, and the tokens.
    n_parameters
        Numbers in all weights; by default those of plain blocks of these sizes.
    parameter_bytes
        Bytes of a number, as the model runs.
    """

    n_layers: int
    d_model: int
    d_mlp: int = 0
    d_vocab: int = 50_000
    n_parameters: int = 0
    parameter_bytes: int = 4

    def __post_init__(self) -> None:
        limits = {"n_layers": _LAYERS, "d_model": _WIDTH, "d_mlp": 10 * _WIDTH, "d_vocab": _VOCABULARY}
        for name, most in limits.items():
            check_int(getattr(self, name), name, min=0 if name == "d_mlp" else 1, max=most)
        check_int(self.n_parameters, "n_parameters", min=0, max=_MOST * 1000)
        check_int(self.parameter_bytes, "parameter_bytes", min=1, max=8)
        if not self.d_mlp:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        if not self.n_parameters:
            of_block = 4 * self.d_model**2 + 2 * self.d_mlp * self.d_model
            object.__setattr__(self, "n_parameters", self.n_layers * of_block + self.d_vocab * self.d_model)

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Shape:
        """The shape of a model that is loaded."""
        config, weights = model.cfg, list(model.original_model.parameters())
        classes = model.original_model.config.num_labels if is_visual(model) else config.d_vocab
        return cls(
            n_layers=config.n_layers, d_model=config.d_model,
            d_mlp=ModelLayout.from_model(model).d_mlp or config.d_mlp or 0,
            d_vocab=classes, n_parameters=sum(weight.numel() for weight in weights),
            parameter_bytes=max((weight.element_size() for weight in weights), default=4),
        )  # fmt: skip

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        revision: str | None = None,
        parameter_bytes: int = 4,
        trust_remote_code: bool = False,
    ) -> Shape:
        """The shape that the configuration of a model says, without its weights.

        Raises
        ------
        InputError
            There is no such model, or its configuration cannot be read or names no layers and no width.
        """
        from matlens.models.sizes import read_sizes

        said: Any = read_sizes(name, revision=revision, trust_remote_code=trust_remote_code)
        absent = [key for key, value in said.items() if value is None]
        if absent:
            raise InputError(
                f"The configuration of {name!r} does not say its {', '.join(absent)}. Give the shape: "
                "--layers, --width, --mlp and --vocab."
            )
        return cls(**said, parameter_bytes=parameter_bytes)


@checked
@dataclass(frozen=True)
class Need:
    """What a step takes.

    Attributes
    ----------
    step
        What is done, in words.
    memory
        Bytes that it holds at its peak besides the model's weights, those of the arrays that count.
    disk
        Bytes that it writes at most; what a killed run goes on from, and is removed in the end, with it.
    operations
        Floating-point operations, a multiplication and an addition being two.
    """

    step: str
    memory: int
    disk: int
    operations: int


@checked
@dataclass(frozen=True)
class Plan:
    """The steps of a study, in the order in which they run.

    Attributes
    ----------
    shape
        The model.
    needs
        One for each step; the model itself is the first.
    moments
        Bytes of the moments of all layers, which a fit keeps while vectors pass by.
    """

    shape: Shape
    needs: tuple[Need, ...]
    moments: int

    def __getitem__(self, step: str) -> Need:
        for need in self.needs:
            if isinstance(step, str) and need.step == step:
                return need
        raise KeyError(f"There is no step {step!r}; there are {', '.join(need.step for need in self.needs)}")

    @property
    def weights(self) -> int:
        """Bytes of the model's weights."""
        return self.shape.n_parameters * self.shape.parameter_bytes

    def memory(self, step: str) -> int:
        """Bytes at the peak of a step, with the model where the step runs it.

        Raises
        ------
        InputError
            There is no such step.
        """
        check_choice(step, [need.step for need in self.needs], "step")
        without = step == "load the model" or step.startswith("fit from ")
        return self[step].memory + self.weights * (not without)

    @property
    def job(self) -> tuple[int, int]:
        """Most memory of collecting and fitting as ``matlens run`` does both, and the disk that they fill."""
        steps = [need for need in self.needs if need.step == "collect" or need.step.startswith("fit from ")]
        return max(self.memory(need.step) for need in steps), sum(need.disk for need in steps)


@checked
def plan_study(
    shape: Shape,
    n_train: int,
    n_validation: int = 0,
    *,
    positions: PositionsToPlan = "drawn",
    pairs: PairsToPlan = "all",
    train_tokens: int | None = None,
    intercept: bool = False,
    keep_rows: bool = False,
    batch_tokens: PositiveInt = BATCH_TOKENS,
) -> Plan:
    """Say what each step of a study takes.

    Maps are fitted on vectors that were collected or, at all positions, on moments that were kept while the
    vectors passed by.

    Parameters
    ----------
    shape
        The model.
    n_train, n_validation
        Sentences that maps are fitted on, and those that they are evaluated on.
    positions
        Whether maps are fitted on one drawn token of each training sentence or on all.
    pairs
        Maps onto the last layer, or between all.
    train_tokens
        Tokens of the training sentences, by default thirty each.
    intercept
        Whether a bias is fitted.
    keep_rows
        Whether the vectors of all positions are collected, as with ``--keep-rows``.
    batch_tokens
        Most tokens in a batch.

    Raises
    ------
    InputError
        A number is not one of these things.
    """
    n_train = check_int(n_train, "The number of training sentences", min=1, max=_MOST)
    n_validation = check_int(n_validation, "The number of validation sentences", min=0, max=_MOST)
    check_choice(positions, ("drawn", "all"), "positions")
    check_choice(pairs, PAIRS, "pairs")
    batch_tokens = check_int(batch_tokens, "batch_tokens", min=1, max=_MOST)
    tokens = SENTENCE * n_train if train_tokens is None else train_tokens
    tokens = check_int(tokens, "train_tokens", min=n_train, max=_MOST * 1000)
    n_rows = n_train if positions == "drawn" else tokens
    length = max(tokens // n_train, 1)
    run = tokens if positions == "all" else tokens // 2 + n_train  # up to the drawn token
    validated = n_validation * (length // 2 + 1)
    rows_of_batch = min(n_rows, batch_tokens if positions == "all" else max(2 * batch_tokens // length, 1))
    n_layers, d, d_mlp = shape.n_layers, shape.d_model, shape.d_mlp
    n_pairs = n_layers if pairs == "last" else n_layers * (n_layers + 1) // 2
    of_block = max(shape.n_parameters - shape.d_vocab * d, 0)
    of_pass = 4 * batch_tokens * (8 * d + 3 * d_mlp)
    sources = stream_widths(n_layers, d, pairs)
    most_targets = max(d_out for _, d_out in sources) // d
    summing, solving = _fit_operations(n_rows, n_layers, d, n_pairs)
    validation = (n_validation, length * n_validation, n_validation)
    on_validation = collected_bytes(shape, *validation) if n_validation else 0
    on_train = collected_bytes(shape, n_rows, tokens, n_train)
    passing, maps = 2 * of_block * (run + validated), 4 * n_pairs * d * (d + intercept)
    collecting = of_pass + 8 * (n_layers + 1) * rows_of_batch * d

    def streamed(*, written: bool) -> int:
        return streamed_fit_bytes(n_rows, sources, of_sample=(n_layers + 1) * d, widest=d, written=written)

    fits: tuple[Need, ...]
    if positions == "all" and not keep_rows:
        # A state to go on from lies beside the one before, and the last one beside what comes of it.
        moments = 2 * written_moments_bytes(n_rows, sources, norms=are_few(n_rows, d))
        fits = (
            Need("collect", collecting + streamed(written=True), on_validation + moments, passing + summing),
            Need("fit from moments", stored_fit_bytes(sources, n_rows=n_rows), maps, solving),
        )
    else:
        of_rows = collected_fit_bytes(n_rows, d, n_sites=n_layers + 1, most_targets=most_targets)
        fits = (
            Need("collect", collecting, on_train + on_validation, passing),
            Need("fit from collected vectors", of_rows, maps, summing + solving),
            Need(
                "fit while vectors pass by",
                collecting + streamed(written=False),
                maps,
                2 * of_block * run + summing + solving,
            ),
        )
    read = n_layers * n_validation * 2 * shape.d_vocab * d  # of all maps onto the last layer, and identities
    return Plan(shape, (
        Need("load the model", shape.n_parameters * shape.parameter_bytes, 0, 0),
        *fits,
        Need(
            "evaluate", 4 * _ROWS * shape.d_vocab * 4 + 8 * n_validation * d, 0,
            2 * n_pairs * n_validation * d * d + 2 * read,
        ),
        Need(
            "trace updates", of_pass + 4 * min(_SCREENED, n_validation * shape.d_vocab)
            + 8 * rows_of_batch * n_layers * (2 * d + d_mlp) + 2 * shape.d_vocab * d,
            trace_bytes(shape, n_validation), 2 * of_block * validated + 4 * read // 2,
        ),
        Need(
            f"top {_TOP} tokens of all value vectors", 4 * d_mlp * _TOP * 2 + 4 * _ROWS * shape.d_vocab,
            0, 2 * n_layers * d_mlp * d * shape.d_vocab,
        ),
    ), sum(moments_bytes(*widths) for widths in sources))  # fmt: skip


@checked
def collected_bytes(shape: Shape, n_rows: int, n_tokens: int, n_positions: int) -> int:
    """Bytes of the arrays in a folder of collected vectors: a row for each site, tokens and positions.

    The few thousand bytes of ``config.json`` come on top.
    """
    n_sentences = n_positions
    columns = (shape.n_layers + 1) * file_bytes(n_rows, Column(shape.d_model))
    integers = (n_tokens, n_sentences + 1, n_positions, n_positions)
    return columns + sum(128 + 8 * n for n in integers)


@checked
def trace_bytes(shape: Shape, n_rows: int, k: int = _DOMINANT) -> int:
    """Bytes of the columns of a trace with ``k`` dominant and random sub-updates."""
    narrow = [Column(shape.n_layers, "int32")] * 3 + [Column(shape.n_layers)] * 2
    wide = [Column(shape.n_layers * k, "int32")] * 2 + [Column(shape.n_layers * k)] * 6
    return sum(file_bytes(n_rows, column) for column in (*narrow, *wide))


def _fit_operations(n: int, n_layers: int, width: int, n_pairs: int) -> tuple[int, int]:
    """Each source is factorised, with its Q, and the targets are multiplied by it; the triangle is solved."""
    return n_layers * (4 * n * width**2) + n_pairs * (2 * n * width**2), n_pairs * width**3
