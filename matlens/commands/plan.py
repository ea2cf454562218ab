"""What a job takes, said before anything runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from matlens.cli.options import DtypeChoice, PositionChoice, Revision, Trust
from matlens.cli.printing import print_line, print_table
from matlens.errors import InputError

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
    sentences: Annotated[int, typer.Option(min=1, help="Sentences that maps are fitted on.")] = 9000,
    val: Annotated[int, typer.Option(min=0, help="Sentences that they are evaluated on.")] = 3000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sentence.")] = 30,
    positions: Annotated[
        PositionChoice, typer.Option(help="drawn or all, as in 'matlens run'.")
    ] = PositionChoice.drawn,
    pairs: Annotated[str, typer.Option(help="all or last, as in 'matlens run'.")] = "all",
    intercept: Annotated[bool, typer.Option("--intercept", help="Fit a bias too.")] = False,
    dtype: Annotated[DtypeChoice, typer.Option(help="Precision of the model.")] = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Say what memory, disk and operations each step takes, and which maps fit, before anything runs."""
    from matlens.arguments import require_choice
    from matlens.study.plan import PAIRS, Shape, plan_study
    from matlens.study.room import free_memory, in_words

    require_choice(pairs, PAIRS, "--pairs")
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
    everywhere: Any = "all" if positions is PositionChoice.all else "drawn"
    plans = {
        which: plan_study(
            shape, sentences, val, positions=everywhere, pairs=which, train_tokens=tokens * sentences,
            intercept=intercept,
        )
        for which in kinds
    }  # fmt: skip
    free, chosen = free_memory(), plans[pairs]
    rows = []
    for need in chosen.needs:
        memory = chosen.memory(need.step)
        fits = "unknown" if free is None else "yes" if memory <= free else "no"
        cells = (in_words(memory), in_words(need.disk) if need.disk else "–", f"{need.operations:.1e}")
        rows.append((need.step, *cells, fits))
    print_table(
        f"{shape.n_layers} layers of {shape.d_model:,}, {shape.n_parameters:,} parameters; "
        f"{sentences:,}+{val:,} sentences, {everywhere} positions, pairs {pairs}",
        ("step", "memory", "disk", "operations", "fits"), rows,
    )  # fmt: skip
    for which, of_pairs in plans.items():
        memory = min(
            of_pairs.memory(f"fit {how}") for how in ("from collected vectors", "while vectors pass by")
        )
        verdict = "" if free is None else ", which fits" if memory <= free else ", which does not fit"
        print_line(
            f"--pairs {which}: moments of {in_words(of_pairs.moments)} in float64 while vectors pass by; a "
            f"fit takes at least {in_words(memory)} of memory{verdict}."
        )
    if free is not None:
        print_line(f"{in_words(free)} of memory are free here.")
