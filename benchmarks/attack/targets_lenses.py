"""Targets of lenses and trained maps, and of sums of pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import matlens
from attack.badness import _short
from attack.kept import kept, saved
from attack.signatures import Target
from attack.world import World
from matlens import lens, linear

ROWS: dict[str, Any] = {
    "h": lambda w: w.activations[1],
    "last": lambda w: w.activations[3],
    "start": lambda _: lens.LayerMap(torch.eye(32)),
}
TRAINING = {"h": "vectors", "last": "vectors", "start": "object", "norm": "object"}


def with_lens(name: str, kinds: dict[str, str] | None = None, **more: Any) -> Target:
    """A method of a lens."""
    return Target(f"Lens.{name}", kinds or {}, owner=lambda w: w.lens, **more)


def jacobian_file(world: World) -> Path:
    """A file of TransformerLens' Jacobian lens."""
    path = world.root / "lens.pt"
    world.lens.to_jacobian_lens(path)
    return path


def tuned_folder(world: World) -> Path:
    """A folder of tuned-lens."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"d_model": 32, "num_hidden_layers": 3}))
        weights = {f"{layer}.weight": torch.eye(32) for layer in range(3)}
        torch.save(weights, folder / "params.pt")

    return saved(world, "tuned", write)


LENSES: list[Target] = [
    # A lens.
    Target(
        "Lens",
        {"maps": "object", "method": "text", "provenance": "object", "norm": "", "readout": "", "model": ""},
        {
            "maps": lambda _: {0: lens.LayerMap()},
            "method": lambda _: "by hand",
            "provenance": lambda w: w.stream_maps.provenance,
        },
        takes={"method=''": lambda _, made: made.method == ""},
    ),
    Target("Lens.identity"),
    Target(
        "Lens.from_maps",
        {"maps": "maps, other maps", "method": "text"},
        {"maps": lambda w: w.stream_maps, "model": lambda w: w.model},
        finish=lambda w, made: made.logits(w.activations[0], 0),
        takes={"method=''": lambda _, logits: logits.isfinite().all()},
    ),
    Target(
        "Lens.fit",
        {"corpus": "corpus", "method": "methods", "positions": "choice"},
        {"corpus": lambda w: w.activations},
        takes={  # whatever gives samples of the model
            "corpus=examples": lambda _, fitted: fitted.n_samples > 60,
            "folder": lambda _, fitted: fitted.n_samples == 60,  # closed forms keep no rows
        },
    ),
    Target(
        "Lens.from_moments",
        {"moments": "object", "method": "choice", "model": "model"},
        {"moments": lambda w: w.lens_moments, "method": lambda _: "mat"},
    ),
    with_lens("resolve", {"layer": "site"}),
    with_lens("__call__", {"h": "any vectors", "layer": "site"}),
    with_lens("logits", {"h": "any vectors", "layer": "site", "gradients": "truth"}),
    with_lens("on", {"model": "model"}),
    with_lens("trajectory", {"prompt": "prompt"}, takes={"layers=[]": lambda _, read: read.layers == (3,)}),
    with_lens("top_tokens", {"prompt": "prompt"}, takes={"layers=[]": lambda _, top: {*top} == {3}}),
    with_lens("save"),
    with_lens("to_jacobian_lens", {"path": "file written"}, good={"path": lambda w: w.fresh("lens.pt")}),
    Target("Lens.load", {"folder": "path read", "model": "model"}, {"folder": kept("lens")}),
    Target("Lens.from_jacobian_lens", {"path": "path read"}, {"path": jacobian_file}),
    Target("Lens.from_tuned_lens", {"folder": "path read"}, {"folder": tuned_folder}),
    Target(
        "lens.LayerMap",
        {"weight": "vectors", "right": "vectors", "bias": "object", "scale": "number"},
        {"weight": lambda _: torch.eye(32)},
        finish=lambda w, held: lens.Lens({1: held}, "by hand", w.stream_maps.provenance).save(w.fresh("out")),
        takes={"weight=None": lambda _, nothing: nothing is None},
    ),
    Target(
        "lens.LayerMap.matrix",
        {"width": "whole"},
        {"width": lambda _: 4},
        lambda _: lens.LayerMap(),
    ),
    Target(
        "lens.LayerMap.__call__",
        owner=lambda w: w.lens.maps[1],
        takes={f"h=with_{label}": lambda _, out: not out.isfinite().all() for label in ("nan", "infinity")},
    ),
    Target(
        "lens.Standardisation",
        {"kind": "choice", "eps": "positive"},
        {"kind": lambda _: "rms", "eps": lambda _: 1e-5},
    ),
    Target("lens.Standardisation.from_model"),
    Target(
        "lens.Standardisation.__call__",
        owner=lambda _: lens.Standardisation("rms"),
        takes={  # of any width, and what is no number stays none
            "h=no_columns": lambda _, out: out.shape[-1] == 0,
            "h=too_narrow": lambda _, out: out.shape[-1] == 31,
            "h=too_wide": lambda _, out: out.shape[-1] == 64,
            **{f"h=with_{label}": lambda _, out: not out.isfinite().all() for label in ("nan", "infinity")},
        },
    ),
    Target(
        "lens.LensMoments",
        {"provenance": "object", "methods": "methods", "norm": "object"},
        {"provenance": lambda w: w.activations.provenance, "methods": lambda _: ["mat"]},
    ),
    Target(
        "lens.LensMoments.update",
        {"vectors": "object", "places": "object", "keys": "object"},
        {"vectors": lambda w: dict(w.activations)},
        lambda w: lens.LensMoments(w.activations.provenance, ["mat"]),
    ),
    Target(
        "lens.LensMoments.merge",
        {"other": "object"},
        {"other": lambda w: lens.lens_moments(w.model, w.activations, ["mat"], progress=False)},
        lambda w: lens.LensMoments(w.activations.provenance, ["mat"]),
    ),
    Target(
        "lens.LensMoments.solve",
        {"methods": "methods"},
        {"methods": lambda _: "mat"},
        lambda w: w.lens_moments,
    ),
    Target(
        "lens.lens_moments",
        {"data": "corpus", "methods": "methods", "positions": "choice"},
        {"data": lambda w: w.activations, "methods": lambda _: ["mat"]},
        takes={
            "data=examples": lambda _, moments: (
                moments.solve("mat")["mat"].provenance.details["n_fitted"] > 60
            ),
        },
    ),
    # A prompt through it.
    *[
        Target(
            f"lens.Trajectory.{name}",
            {"token": "text", "answer": "text", "answers": "sentences", "position": "layer"},
            {"token": lambda _: "w1", "answer": lambda _: "w1"},
            lambda w: w.trajectory,
            takes={
                "token=3": lambda _, of_token: of_token is not None,  # the number of one
                "answer=3": lambda w, layer: layer in (None, *w.trajectory.layers),
                "answers=[]": lambda _, table: "rank" in table,
                "answers=[3]": lambda _, table: set(table["answer_rank"]) <= set(range(1, 1000)),
            },
        )
        for name in ("token_id", "rank", "probability", "first_top1", "to_dataframe")
    ],
    Target(
        "lens.Trajectory.plot",
        {"path": "file written", "colour": "choice", "positions": "numbers"},
        {"path": lambda w: w.fresh("figure.png")},
        lambda w: w.trajectory,
        takes={"positions=[0, -1]": lambda _, figure: len(figure.axes) > 0},  # the first and the last
    ),
    Target(
        "lens.read_cells",
        {"logits": "object", "vectors": "object", "followed": "object"},
        {
            "logits": lambda w: w.lens.logits,
            "vectors": lambda w: [w.activations[0][:4], w.activations[3][:4]],
            "followed": lambda _: torch.tensor([5, 6]),
        },
    ),
    # Trained maps.
    Target(
        "lens.VocabularySample.from_weights",
        {"weights": "object"},
        {"weights": lambda _: torch.ones(60)},
        takes={  # all, where there are no more
            f"n={_short(n)}": lambda _, sample: bool((sample.chances == 1).all()) for n in (10**6, 10**40)
        },
    ),
    Target(
        "lens.VocabularySample.draw",
        {"generator": "object"},
        {"generator": lambda _: torch.Generator().manual_seed(0)},
        lambda _: lens.VocabularySample.from_weights(torch.ones(60), 9),
    ),
    Target(
        "lens.divergence",
        {"scores": "vectors", "truth": "vectors", "offset": "object"},
        {"scores": lambda _: torch.rand(4, 9), "truth": lambda _: torch.rand(4, 9)},
    ),
    *[
        Target(
            f"lens.{name}",
            TRAINING
            | {
                "tokens": "count",
                "steps": "whole",
                "batch": "whole",
                "rate": "positive",
                "passes": "positive",
            },
            ROWS | {"steps": lambda _: 2},
            takes={  # all, where there are no more
                f"tokens={_short(n)}": lambda _, held: held.weight.isfinite().all() for n in (10**6, 10**40)
            },
        )
        for name in ("polish", "scale_map", "tune")
    ],
    Target("lens.best_start"),
    Target(
        "lens.train_maps",
        {"name": "choice", "rows": "activations, other activations", "start": "object"},
        {"name": lambda _: "tuned", "rows": lambda w: w.activations, "layers": lambda _: [1]},
    ),
    Target(
        "lens.fit_jacobian",
        {"longest": "whole", "skip": "whole", "at_once": "whole"},
        {"skip": lambda _: 0, "layers": lambda _: [1], "prompts": lambda w: list(w.sentences[:1])},
        takes={
            "skip=0": lambda _, fitted: list(fitted.maps) == [1],
            f"prompts={_short(['w1 ' * 10**4])}": lambda _, fitted: list(fitted.maps) == [1],  # it is cut
        },
    ),
    # Maps and sums.
    Target(
        "LinearMap.from_solution",
        {"weight": "object", "bias": "object", "source": "site", "target": "site"},
        {
            "weight": lambda _: torch.eye(3),
            "bias": lambda _: None,
            "source": lambda _: "h.0",
            "target": lambda _: "h.1",
        },
        finish=lambda _, made: matlens.MapSet([made])[made.source, made.target],
        takes={
            "bias=None": lambda _, made: made.bias is None,
            "weight=a_tensor": lambda _, made: torch.equal(made.weight, torch.zeros(2, 2)),
            **{
                f"{end}={name!r}": lambda _, made: made is not None
                for end in ("source", "target")
                for name in ("h.99", "bogus.1", "attn_out.77")
            },
        },
    ),
    Target(
        "linear.LeastSquares.from_state",
        {"r": "vectors", "z": "vectors", "n": "whole", "source": "text", "target": "text"},
        {"r": lambda w: w.moments.state[0], "z": lambda w: w.moments.state[1], "n": lambda _: 60},
        takes={f"{end}=''": lambda _, moments: moments.n == 60 for end in ("source", "target")},
    ),
    Target("linear.LeastSquares.factors", {"centred": "truth"}, owner=lambda w: w.moments),
    Target(
        "linear.PairMoments",
        {"widths": "object", "norms": "truth"},
        takes={  # a pair is named before a model is known
            **{
                f"pairs={pairs}": lambda _, moments: moments.n == 0
                for pairs in ([(0, 99)], [(3, 0)], [(0, 0)])
            },
            "pairs=[('bogus.0', 'h.3')]": lambda _, moments: moments.n == 0,
            "widths={}": lambda _, moments: moments.n == 0,
        },
    ),
    Target(
        "linear.PairMoments.update",
        {"vectors": "object"},
        {"vectors": lambda w: dict(w.activations)},
        lambda w: linear.PairMoments([("h.0", "h.3")]),
    ),
    Target(
        "linear.PairMoments.merge",
        {"other": "object"},
        {"other": lambda w: w.pair_moments},
        lambda w: linear.PairMoments([("h.0", "h.3")]),
    ),
    *[
        Target(
            f"linear.PairMoments.{name}",
            {"source": "site"},
            {"source": lambda _: "h.0"},
            lambda w: w.pair_moments,
        )
        for name in ("moments", "norms")
    ],
    Target(
        "linear.PairMoments.restore",
        {"source": "site", "moments": "object", "norms": "object"},
        {"source": lambda _: "h.0", "moments": lambda w: w.moments, "norms": lambda _: None},
        lambda w: linear.PairMoments([("h.0", "h.3")]),
        takes={"norms=None": lambda _, nothing: nothing is None},
    ),
    Target(
        "linear.update_bytes",
        {"n": "whole", "width": "whole", "n_targets": "whole", "held": "truth"},
        {"n": lambda _: 9, "width": lambda _: 9, "n_targets": lambda _: 2, "held": lambda _: True},
    ),
    Target(
        "linear.convert_published",
        {"source": "path read", "folder": "path written"},
        {"source": kept("published")},
    ),
]
