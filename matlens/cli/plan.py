"""What a job takes, said before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from matlens.cli.options import TRAIN, VAL, DtypeChoice, KeepRows, PositionChoice, Revision, Trust
from matlens.cli.printing import print_line, print_table
from matlens.errors import InputError, check_choice

_BYTES = {DtypeChoice.float32: 4, DtypeChoice.bfloat16: 2, DtypeChoice.float16: 2}


def plan(
    model: Annotated[
        str | None, typer.Option(help="Like --model elsewhere; only its configuration is read.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="L, where there is no --model.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the stream, with --layers.")] = None,
    mlp: Annotated[
        int | None, typer.Option(min=1, help="Coefficients of an FFN.", show_default="4 x width")
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the vocabulary, with --layers.", show_default="50000"),
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences that maps are fitted on.")] = TRAIN,
    val: Annotated[int, typer.Option(min=0, help="Sentences that they are evaluated on.")] = VAL,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sentence.")] = 30,
    positions: Annotated[
        PositionChoice, typer.Option(help="drawn, all or auto, as in 'matlens run'.")
    ] = PositionChoice.drawn,
    keep_rows: KeepRows = False,
    pairs: Annotated[str, typer.Option(help="all or last, as in 'matlens run'.")] = "all",
    intercept: Annotated[bool, typer.Option("--intercept", help="Fit a bias too.")] = False,
    dtype: Annotated[DtypeChoice, typer.Option(help="Precision of the model.")] = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Say what memory, disk and operations each step takes, and which maps fit, before anything runs."""
    from matlens.linear.samples import are_few
    from matlens.study.plan import PAIRS, Shape, plan_study
    from matlens.study.room import free_disk, free_memory, in_words

    check_choice(pairs, PAIRS, "--pairs")
    given = [number is not None for number in (layers, width, mlp, vocab)]
    if any(given) if model is not None else not all(given[:2]):
        raise InputError(
            "Which model? Expected either --model, or its shape: --layers and --width, and --mlp and "
            "--vocab where they are known."
        )
    if model is not None:
        shape = Shape.from_name(
            model, revision=revision, parameter_bytes=_BYTES[dtype], trust_remote_code=trust_remote_code
        )
    else:
        shape = Shape(
            n_layers=layers or 0,
            d_model=width or 0,
            d_mlp=mlp or 0,
            d_vocab=vocab or 50_000,
            parameter_bytes=_BYTES[dtype],
        )
    kinds: tuple[Any, ...] = tuple(PAIRS)
    few = are_few(sentences, shape.d_model)
    of_few = positions is PositionChoice.auto and few
    everywhere: Any = "all" if positions is PositionChoice.all or of_few else "drawn"
    plans = {
        which: plan_study(
            shape, sentences, val, positions=everywhere, pairs=which, train_tokens=tokens * sentences,
            intercept=intercept, keep_rows=keep_rows,
        )
        for which in kinds
    }  # fmt: skip
    free, disk, chosen = free_memory(), free_disk(Path()), plans[pairs]

    def fits(memory: int, written: int) -> str:
        return "no" if written > disk else "unknown" if free is None else "yes" if memory <= free else "no"

    rows = []
    for need in chosen.needs:
        memory = chosen.memory(need.step)
        cells = (in_words(memory), in_words(need.disk) if need.disk else "–", f"{need.operations:.1e}")
        rows.append((need.step, *cells, fits(memory, need.disk)))
    how = f"{everywhere} positions{', which are kept' if everywhere == 'all' and keep_rows else ''}"
    print_table(
        f"{shape.n_layers} layers of {shape.d_model:,}, {shape.n_parameters:,} parameters; "
        f"{sentences:,}+{val:,} sentences, {how}, pairs {pairs}",
        ("step", "memory", "disk", "operations", "fits"), rows,
    )  # fmt: skip
    for which, of_pairs in plans.items():
        memory, written = of_pairs.job
        verdict = {"yes": ", which fits", "no": ", which does not fit"}.get(fits(memory, written), "")
        print_line(
            f"--pairs {which}: moments of {in_words(of_pairs.moments)} in float64 while vectors pass by; "
            f"collecting and fitting take {in_words(memory)} of memory and {in_words(written)} of disk"
            f"{verdict}."
        )
    if everywhere == "all" and not keep_rows:
        print_line(
            "Collecting keeps moments, and on disk the state that a killed run goes on from; --keep-rows "
            "keeps the vectors instead."
        )
    if everywhere == "drawn" and few:
        print_line(
            f"{sentences:,} sentences are few for {shape.d_model:,} dimensions: unless it is told "
            "--positions drawn, 'matlens run' takes all of their tokens where the model predicts the next "
            "one. --positions auto plans that."
        )
    print_line(
        f"{'' if free is None else in_words(free) + ' of memory and '}{in_words(disk)} of disk are free here."
    )
