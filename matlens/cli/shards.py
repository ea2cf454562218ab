"""Parts of one job, run anywhere and at any time, and joined to its maps."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from matlens.cli.groups import CorpusOptions, FitOptions, ModelOptions, SampleOptions, grouped
from matlens.cli.options import Out, PairsOption, Shard, Shards
from matlens.cli.printing import print_line
from matlens.errors import InputError, printable


def _name_the_command(part: str | None) -> None:
    if part is not None:
        raise InputError(
            "'matlens fit' fits what 'collect' has written, all at once. A part of a job is run by "
            f"'matlens shard --shard {printable(part, most=12)} --model ... --corpus ... --out FOLDER', and "
            "'matlens merge FOLDER... --out FOLDER' joins the parts and fits the maps."
        )


Elsewhere = Annotated[
    str | None, typer.Option("--shard", hidden=True, is_eager=True, callback=_name_the_command)
]


@grouped
def shard(
    shard: Shard,
    model: ModelOptions,
    corpus: CorpusOptions,
    samples: SampleOptions,
    pairs: PairsOption = "all",
) -> None:
    """Run one part of the training sentences and keep what fits need of it: moments, and no vectors.

    All parts are given the same options but for --shard and --out. 'matlens merge' joins them.
    """
    number, of = _read_shard(shard)
    how = FitOptions(pairs)
    wanted = how.fit_arguments()["pairs"]
    samples.check_shard(model, how)
    study = samples.study(model, corpus, pairs=wanted)
    kept = study.shard_moments(number, of)
    print_line(
        f"Shard {number}/{of}: moments of {kept.n_samples:,} samples in {samples.out}. When all are there: "
        "matlens merge FOLDER... --out FOLDER"
    )


@grouped
def merge(shards: Shards, out: Out, how: FitOptions) -> None:
    """Join the moments of all shards of a job, in OUT/moments, and fit maps on them, in OUT/maps."""
    arguments = how.fit_arguments()
    from matlens.activations.stored_moments import StoredMoments, merge_moments
    from matlens.linear.pairs import resolve_pairs
    from matlens.linear.sums import check_kept
    from matlens.study.fits import fit_moments
    from matlens.study.output import MAPS, MOMENTS
    from matlens.study.room import check_room_to_merge

    kept = StoredMoments(*shards)
    if how.pairs == "all":  # all that the shards have kept
        arguments["pairs"] = None
    else:
        check_kept(kept, resolve_pairs(arguments["pairs"], kept.provenance))  # before anything is written
    check_room_to_merge(kept, out / MOMENTS)
    maps = fit_moments(merge_moments(kept, out / MOMENTS), out / MAPS, **arguments)
    print_line(
        f"{len(maps)} maps of {kept.n_samples:,} samples in {out / MAPS}. 'matlens run' with the options of "
        f"the shards and --out {out} evaluates them."
    )


def _read_shard(text: str) -> tuple[int, int]:
    read = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if read is None or not 1 <= int(read[1]) <= int(read[2]):
        raise InputError(f"--shard {text[:40]}: expected a part such as 3/8, from 1/8 to 8/8.")
    return int(read[1]), int(read[2])
