"""Kinds of parameters, and what is bad for each: wrong kinds, wrong numbers, wrong shapes, other models'."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from attack.world import World

KIND, STORAGE, RANGE, HUGE, SHAPE, FINITE, EMPTY, OTHER, FILES = (
    "wrong kinds",
    "arrays of other kinds",
    "numbers out of range",
    "huge numbers",
    "wrong shapes and dtypes",
    "NaN and infinity",
    "nothing at all",
    "other models and tables",
    "paths, links and devices",
)


class Bad(NamedTuple):
    """A bad value.

    Attributes
    ----------
    fault
        The class of what is wrong with it.
    label
        How it is called in a case's name.
    make
        Makes the value.
    same
        Whether the library may take it, if it gives what the good value gives.
    """

    fault: str
    label: str
    make: Callable[[World], Any]
    same: bool = False


def _given(fault: str, *values: Any, same: bool = False) -> list[Bad]:
    return [Bad(fault, _short(value), _constant(value), same) for value in values]


def _constant(value: Any) -> Callable[[World], Any]:
    return lambda _: value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:30]}...({len(text)})"


def _made(fault: str, *, same: bool = False, **makers: Callable[[World], Any]) -> list[Bad]:
    return [Bad(fault, label, make, same) for label, make in makers.items()]


_OBJECTS = [
    *_given(KIND, None, 3, 2.5, "gpt2", [], {}, ["a", "b"], b"x"),
    *_made(KIND, an_array=lambda _: np.zeros((2, 2)), a_tensor=lambda _: torch.zeros(2, 2)),
]
_TEXTS = [*_given(KIND, None, 3, 2.5, b"x", ["a"], {}, object), *_made(KIND, an_array=lambda _: np.zeros(2))]
_NO_NUMBERS = _given(KIND, None, "3", [1], {}, "many", 1 + 2j, b"3")
_NO_WHOLES = [*_NO_NUMBERS, *_given(KIND, 2.5, True), *_given(FINITE, float("nan"), float("inf"))]
_MANY, _TOO_MANY = 10**6, 10**40
_PATHS = [
    *_given(KIND, 3, 2.5, ["a"], {}, b"x"),
    *_made(KIND, an_object=lambda _: object()),
    *_given(FILES, "", "a\0b", "x" * 5000, "/proc/nothing/there"),
]


def _stored(good: Callable[[World], torch.Tensor]) -> list[Bad]:
    """Arrays whose numbers do not lie there one by one."""
    return _made(
        STORAGE,
        sparse=lambda w: good(w).to_sparse(),
        on_no_device=lambda w: good(w).to("meta"),
        partly_masked=lambda w: np.ma.array(good(w).numpy(), mask=np.arange(good(w).numel()) % 2 == 1),
    )


def _tensors(good: Callable[[World], torch.Tensor]) -> list[Bad]:
    """What is bad for vectors, of which ``good`` gives some."""

    def spoilt(number: float) -> Callable[[World], torch.Tensor]:
        def make(world: World) -> torch.Tensor:
            vectors = good(world).clone()
            vectors[..., 0] = number
            return vectors

        return make

    return [
        *_given(KIND, None, 3, "h", ["a"], {}, [[1.0, 2.0]]),
        *_made(KIND, same=True, a_numpy_array=lambda w: good(w).numpy(), a_list=lambda w: good(w).tolist()),
        *_made(
            SHAPE,
            too_narrow=lambda w: good(w)[..., :-1],
            too_wide=lambda w: torch.cat([good(w), good(w)], -1),
            a_number=lambda _: torch.tensor(1.0),
            whole_numbers=lambda w: torch.ones_like(good(w), dtype=torch.int64),
            truth_values=lambda w: torch.ones_like(good(w), dtype=torch.bool),
            complex_numbers=lambda w: good(w).to(torch.complex64),
        ),
        *_stored(good),
        *_made(
            STORAGE,
            quantised=lambda w: torch.quantize_per_tensor(good(w), 0.1, 0, torch.qint8),
            eight_bits=lambda w: good(w).to(torch.float8_e4m3fn),
        ),
        *_made(FINITE, with_nan=spoilt(float("nan")), with_infinity=spoilt(float("inf"))),
        *_made(EMPTY, no_columns=lambda w: good(w)[..., :0]),
    ]


def _vectors(w: World) -> torch.Tensor:
    return w.activations[3]


def _without(examples: Any, **changes: Any) -> Any:
    return replace(examples, **changes)


def _fifo(w: World) -> Path:
    path = w.fresh("fifo")
    os.mkfifo(path)
    return path


def _device(w: World) -> Path:
    """A device of its own: what replaces it replaces none that others need."""
    path = w.fresh("device")
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:  # not as an ordinary user
        os.mkfifo(path)
    return path


def _link(w: World, to: str) -> Path:
    path = w.fresh("link")
    path.symlink_to(to)
    return path


def _full(w: World) -> Path:
    path = w.fresh("full")
    path.mkdir()
    (path / "other.txt").write_text("something else")
    return path


def _wrong_column(table: pd.DataFrame, name: str, value: Any) -> pd.DataFrame:
    return table.assign(**{name: value})


_READ_PATHS = [
    *_given(KIND, None),
    *_PATHS,
    *_given(FILES, "/nowhere/at/all", "/dev/null", "/dev/zero", "."),
    *_made(
        FILES,
        a_fifo=_fifo,
        a_loop=lambda w: _link(w, "link"),
        a_link_to_nothing=lambda w: _link(w, "nothing"),
        an_empty_folder=lambda w: w.fresh("empty").parent,
        a_folder_of_others=_full,
        a_text=lambda w: w.text,
    ),
]
_WRITTEN_PATHS = [
    *_PATHS,
    *_given(FILES, "/dev/null/x"),
    *_made(
        FILES,
        a_device=_device,
        a_fifo=_fifo,
        a_loop=lambda w: _link(w, "link"),
        a_folder_of_others=_full,
        a_text=lambda w: w.text,
        below_a_text=lambda w: w.text / "folder",
    ),
]
# A file is replaced, and so is a link: the link itself.
_WRITTEN_FILES = [bad for bad in _WRITTEN_PATHS if bad.label not in ("a_text", "a_loop")]
_MASKS = [
    *_stored(lambda w: torch.ones(len(w.examples), dtype=torch.bool)),
    *_given(KIND, 3, "all", ["a"], {}),
    *_made(
        SHAPE,
        one_too_few=lambda w: torch.ones(len(w.examples) - 1, dtype=torch.bool),
        one_too_many=lambda w: torch.ones(len(w.examples) + 1, dtype=torch.bool),
        whole_numbers=lambda w: torch.ones(len(w.examples), dtype=torch.int64),
        numbers=lambda w: torch.ones(len(w.examples)),
        a_matrix=lambda w: torch.ones(len(w.examples), 2, dtype=torch.bool),
    ),
    *_made(KIND, same=True, a_numpy_mask=lambda w: np.ones(len(w.examples), dtype=bool)),
    *_made(EMPTY, none_true=lambda w: torch.zeros(len(w.examples), dtype=torch.bool)),
]

KINDS: Mapping[str, list[Bad]] = {
    "whole": [*_NO_WHOLES, *_given(RANGE, 0, -1)],
    "count": [*_NO_WHOLES, *_given(RANGE, 0, -1, _MANY), *_given(HUGE, _TOO_MANY, -_TOO_MANY)],
    "layer": [*_NO_WHOLES, *_given(RANGE, 99, -99), *_given(HUGE, _TOO_MANY)],
    "row": [*_NO_WHOLES, *_given(RANGE, -1, _MANY), *_given(HUGE, _TOO_MANY)],
    "seed": [*_NO_WHOLES, *_given(RANGE, -1), *_given(HUGE, 2**64, _TOO_MANY)],
    "number": [*_NO_NUMBERS, *_given(FINITE, float("nan"), float("inf"), -float("inf"))],
    "positive": [
        *_NO_NUMBERS,
        *_given(FINITE, float("nan"), float("inf")),
        *_given(RANGE, -1.0),
        *_given(HUGE, -1e300),
    ],
    "truth": _given(KIND, "no", None, 2, []),
    "choice": _given(KIND, "bogus", "", 3, None, ["all"], {}, "ALL"),
    "text": [*_TEXTS, *_given(EMPTY, "")],
    "path read": _READ_PATHS,
    "path written": _WRITTEN_PATHS,
    "file written": _WRITTEN_FILES,
    "model": [
        *_OBJECTS,
        *_made(KIND, plain=lambda w: w.plain, examples=lambda w: w.examples, a_class=lambda w: type(w.model)),
    ],
    "tokenizer": _OBJECTS,
    "corpus": [*_OBJECTS, *_made(KIND, examples=lambda w: w.examples, sentences=lambda w: w.sentences)],
    "examples": [
        *_OBJECTS,
        *_made(
            KIND, corpus=lambda w: w.corpus, activations=lambda w: w.activations, ids=lambda w: [[5, 6, 7]]
        ),
        *_made(
            RANGE,
            tokens_past_the_vocabulary=lambda w: _without(w.examples, tokens=w.examples.tokens + 1000),
            negative_tokens=lambda w: _without(w.examples, tokens=w.examples.tokens - 1000),
            positions_past_the_end=lambda w: _without(w.examples, positions=w.examples.positions + 500),
            negative_positions=lambda w: _without(w.examples, positions=w.examples.positions - 500),
            offsets_backwards=lambda w: _without(w.examples, offsets=w.examples.offsets[::-1].copy()),
        ),
        *_made(EMPTY, no_examples=lambda w: w.examples.head(0)),
    ],
    "activations": [
        *_OBJECTS,
        *_made(KIND, examples=lambda w: w.examples, maps=lambda w: w.stream_maps),
    ],
    "other activations": _made(OTHER, of_other_weights=lambda w: w.other_activations),
    "maps": [
        *_OBJECTS,
        *_made(KIND, activations=lambda w: w.activations, one_map=lambda w: w.stream_maps[0, 3]),
    ],
    "other maps": [
        *_made(OTHER, of_other_weights=lambda w: w.other_maps),
        *_made(FINITE, with_nan=lambda w: w.nan_maps),
    ],
    "map": [*_OBJECTS, *_made(KIND, all_maps=lambda w: w.stream_maps)],
    "readout": [*_OBJECTS, *_made(KIND, model=lambda w: w.model)],
    "other readout": _made(OTHER, of_other_weights=lambda w: type(w.readout)(w.load("weights"))),
    "lens": [*_OBJECTS, *_made(KIND, maps=lambda w: w.stream_maps)],
    "other lens": _made(OTHER, of_other_weights=lambda w: w.other_lens),
    "lenses": [
        *_given(KIND, None, 3, "id", ["id"], {"mat": 3}),
        *_made(KIND, one_lens=lambda w: w.lens),
        *_given(EMPTY, {}),
    ],
    "other lenses": _made(OTHER, one_of_other_weights=lambda w: {"mat": w.lens, "other": w.other_lens}),
    "methods": [
        *_given(KIND, None, 3, 2.5, [3], [None], {}, b"mat"),
        *_given(RANGE, "bogus", ["bogus"], ["mat", "ridge(-1)"], "narrow(0)", "mat+mat+mat", "ridge(nan)"),
        *_given(HUGE, "narrow(" + "9" * 5000 + ")", "x" * 10**6, "+" * 10**5),
        *_given(EMPTY, [], ""),
    ],
    "prompt": [
        *_TEXTS,
        *_given(EMPTY, "", " "),
        *_given(HUGE, "w1 " * 10**4),
        *_given(RANGE, "w1 \ud800"),
    ],
    "windows": [
        *_OBJECTS,
        *_made(KIND, corpus=lambda w: w.corpus, activations=lambda w: w.activations),
        *_made(EMPTY, no_examples=lambda w: w.examples.head(0)),
        *_made(
            RANGE, tokens_past_the_vocabulary=lambda w: _without(w.windows, tokens=w.windows.tokens + 1000)
        ),
    ],
    "pruned": [*_OBJECTS, *_made(KIND, model=lambda w: w.model, plain=lambda w: w.plain)],
    "values": [*_OBJECTS, *_made(KIND, model=lambda w: w.model)],
    "other values": _made(
        OTHER,
        of_other_weights=lambda w: type(w.values)(w.load("weights")),
        of_fewer_layers=lambda w: type(w.values)(w.load("layers")),
    ),
    "projection": [*_OBJECTS, *_made(KIND, readout=lambda w: w.readout)],
    "other projection": _made(
        OTHER, of_other_weights=lambda w: type(w.projection).from_model(w.load("weights"))
    ),
    "trace": [*_OBJECTS, *_made(KIND, updates=lambda w: w.updates)],
    "clusters": [*_OBJECTS, *_made(KIND, values=lambda w: w.values)],
    "object": _OBJECTS,
    "sites": [
        *_given(KIND, 3, 2.5, "h.0", [None], [2.5], [["h.0"]], {"h.0": 1}, [object]),
        *_given(
            RANGE, ["h.99"], ["h.-99"], [99], ["attn_out.3"], ["h.0", "bogus.1"], ["blocks.99.hook_resid_pre"]
        ),
        *_given(HUGE, ["h." + "9" * 5000], ["h" * 100000]),
        *_given(EMPTY, [], [""], ["h."]),
    ],
    "site": [
        *_given(KIND, None, 2.5, [], ["h.0"], {}, b"h.0", object, True),
        *_given(RANGE, "h.99", 99, -99, "bogus.1", "h", "h.x", "h.1.2", "attn_out.77"),
        *_given(HUGE, _TOO_MANY, "h." + "9" * 5000, "x" * 10**6),
        *_given(EMPTY, ""),
    ],
    "pair": [
        *_given(KIND, None, 3, "h.0", ("h.0",), (0, 1, 2), [], (None, 3), (0.5, 3), ({}, [])),
        *_given(RANGE, (0, 99), (3, 0), ("bogus.0", "h.3")),
        *_given(HUGE, (_TOO_MANY, 3)),
    ],
    "pairs": [
        *_given(
            KIND, None, 3, 2.5, "bogus", "0:3", [3], ["h.0"], [(0,)], [(0, 1, 2)], [(None, 3)], [(0.5, 3)]
        ),
        *_given(RANGE, [(0, 99)], [(3, 0)], [(0, 0)], [("bogus.0", "h.3")]),
        *_given(HUGE, [(0, _TOO_MANY)]),
        *_given(EMPTY, [], ""),
    ],
    "rows": _MASKS,
    "marks": [bad for bad in _MASKS if bad.label != "none_true"],  # of which there may be none
    "weights": [bad for bad in _MASKS if bad.label != "numbers"],  # how much each counts, so numbers
    "where": [
        *_stored(lambda _: torch.tensor([0, 1])),
        *_given(KIND, None, 3, "bogus", "", ["a"], {}, 2.5),
        *_made(
            SHAPE,
            numbers=lambda _: torch.ones(4),
            a_cube=lambda _: torch.ones(2, 2, 2, dtype=torch.bool),
            another_length=lambda _: torch.ones(3, dtype=torch.int64),
        ),
        *_made(RANGE, past_the_end=lambda _: torch.tensor([99]), negative=lambda _: torch.tensor([-99])),
    ],
    "names": [
        *_given(
            KIND,
            None,
            3,
            "L0D1",
            [None],
            [2.5],
            [3],
            [["a", "b"]],
            {"L0D1": 2.0, 3: 1},
            [b"L0D1"],
            [(1, 2, 3)],
        ),
        *_given(RANGE, ["L99D0"], ["L0D999"], ["x"], ["L0"], ["L0D1", "L-9D0"], [(0, 999)]),
        *_given(HUGE, ["L" + "9" * 5000 + "D0"], [(0, _TOO_MANY)], ["x" * 10**6]),
        *_given(EMPTY, [], [""]),
    ],
    "name": [
        *_given(KIND, None, 3, 2.5, b"L0D1", [], (1,), (1, 2, 3), {}, (0.5, 1), (True, True), "L1"),
        *_given(RANGE, "L99D0", "L0D999", (0, 999), (-9, 0), "L0D1 "),
        *_given(HUGE, "L" + "9" * 5000 + "D0", (0, _TOO_MANY), "x" * 10**6),
        *_given(EMPTY, ""),
    ],
    "name read": [
        *_given(KIND, None, 3, 2.5, b"L0D1", [], (1,), (1, 2, 3), {}, (0.5, 1), "L1", "LxD1"),
        *_given(HUGE, "L" + "9" * 5000 + "D0", "x" * 10**6),
        *_given(EMPTY, ""),
    ],
    "words": [
        *_given(KIND, None, 3, "w1", [None], [3], [b"w1"], {"w1": 1}.items(), [["w1"]]),
        *_given(RANGE, ["w1 w2"], ["absent"], ["w1", "absent"]),
        *_given(HUGE, ["x" * 10**6]),
        *_given(EMPTY, [], [""], [" "]),
    ],
    "texts": [
        *_given(KIND, None, 3, "w1 w2", [None], [3], [b"w1"], [["w1"]], {}),
        *_given(HUGE, ["w1 " * 10**4]),
        *_given(EMPTY, [], [""], [" "], ["w1 w2", ""]),
    ],
    "sentences": _given(KIND, None, 3, "w1 w2", [None], [3], [b"w1"], {}, []),
    "layers": [
        *_given(KIND, 3, "0", 2.5, [None], [0.5], ["a"], [[0]], {}, [True]),
        *_given(RANGE, [99], [0, -99]),
        *_given(HUGE, [_TOO_MANY]),
        *_given(EMPTY, []),
    ],
    "numbers": [
        *_given(KIND, None, 3, "0", 2.5, [None], [0.5], ["a"], [[0]]),
        *_given(RANGE, [99], [0, -1]),
        *_given(HUGE, [_TOO_MANY]),
        *_given(EMPTY, []),
    ],
    "vectors": [*_tensors(_vectors), *_made(SHAPE, one_vector=lambda w: _vectors(w)[0])],
    "any vectors": _tensors(_vectors),
    "vector": _tensors(lambda w: _vectors(w)[0]),
    "ids": [
        *_stored(lambda _: torch.full((3, 4), 5)),
        *_given(KIND, None, 3, "h", ["a"], {}),
        *_made(
            SHAPE,
            numbers=lambda _: torch.rand(3, 4),
            a_row=lambda _: torch.arange(3),
            a_cube=lambda _: torch.ones(2, 2, 2, dtype=torch.int64),
            numpy_numbers=lambda _: np.ones((3, 4)),
        ),
        *_made(
            RANGE,
            past_the_vocabulary=lambda _: torch.full((3, 4), 999),
            negative=lambda _: -torch.ones(3, 4).long(),
        ),
        *_made(EMPTY, none=lambda _: torch.zeros(0, 4, dtype=torch.int64)),
    ],
    "table": [
        *_OBJECTS,
        *_made(
            EMPTY,
            no_rows=lambda _: pd.DataFrame(),
            no_columns=lambda _: pd.DataFrame(index=range(3)),
        ),
        *_made(
            OTHER,
            another_table=lambda _: pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
            a_series=lambda _: pd.Series([1, 2]),
        ),
    ],
}
