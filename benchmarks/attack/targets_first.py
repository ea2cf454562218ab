"""Targets of the main job: models, corpora, activations, maps, patching and the study."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

import matlens
from attack.kept import (
    MAPS,
    RANGE,
    STREAM_MAPS,
    identity_of,
    kept,
    moments_of,
    patch_with,
    run_in,
    scheme_of,
)
from attack.signatures import Target
from attack.world import World
from matlens import lens, linear, models, patching


def _is_site(kind: str, layer: int, _: World, site: Any) -> bool:
    return bool((site.kind, site.layer) == (kind, layer))


def _has_end(end: str, name: str, _: World, maps: Any) -> bool:
    return bool(getattr(maps[0], end) == name)


def _ends(linear_map: Any) -> tuple[str, str]:
    return linear_map.source, linear_map.target


def _fits_backwards(source: int, target: int, world: World, maps: Any) -> bool:
    """A map between any two sites is a least-squares fit, whichever comes first in the model."""
    x, y = (world.activations[layer].double() for layer in (source, target))
    solution = torch.linalg.lstsq(x, y, driver="gelsd").solution.T
    (fitted,) = maps
    return bool(torch.allclose(fitted.weight.double(), solution, atol=1e-3))


BACKWARDS = {f"pairs=[{pair}]": partial(_fits_backwards, *pair) for pair in ((3, 0), (0, 0))}
NOT_FINITE = ("with_nan", "with_infinity")
# A site is named before a model is known, which then refuses those that it has not.
NAMED = {
    f"text={text!r}": partial(_is_site, kind, layer)
    for text, kind, layer in (
        ("h.99", "h", 99), (99, "h", 99), (-99, "h", -99), ("bogus.1", "bogus", 1),
        ("attn_out.77", "attn_out", 77),
    )
}  # fmt: skip

FIRST: list[Target] = [
    # The six lines.
    Target("collect", {"positions": "choice", "dtype": ""}),
    Target(
        "load_corpus",
        {"split": "", "name": "text"},
    ),
    Target("make_examples"),
    Target("make_prompts"),
    Target(
        "load",
        {"name": "text", "device": "choice", "dtype": "choice", "revision": "object"},
        {"name": lambda w: str(w.model_folder("gpt2"))},
    ),
    Target("Readout"),
    Target("Readout.logits", owner=lambda w: w.readout),
    Target("Readout.log_probs", owner=lambda w: w.readout),
    Target("Readout.top_tokens", {"h": "vector"}, {"h": lambda w: w.activations[3][0]}, lambda w: w.readout),
    Target("Site.parse", {"text": "site", "n_layers": ""}, {"n_layers": lambda _: 3}, takes=NAMED),
    Target("Site.read", {"text": "site"}, takes=NAMED),
    Target(
        "Site",
        {"kind": "text", "layer": "layer"},
        {"kind": lambda _: "h"},
        takes={f"layer={n}": partial(_is_site, "h", n) for n in (99, -99)},
    ),
    Target(
        "make_token_examples",
        {"tokens": "object", "positions": "where", "attention_mask": "", "name": "", "corpus": ""},
        {"tokens": lambda _: [[5, 6, 7], [8, 9, 10]]},
    ),
    Target("models.changes_of"),
    Target("models.token_policy", {"tokenizer": "tokenizer"}),
    Target(
        "io.verify",
        {"folder": "path read"},
        {"folder": kept("maps")},
        takes={
            f"folder={none}": lambda _, verdicts: verdicts == []  # nothing of this library is there
            for none in ("'.'", "an_empty_folder", "a_folder_of_others")
        },
    ),
    # Maps.
    Target(
        "LinearMap",
        {"weight": "object", "bias": "object", "source": "site", "target": "site"},
        {
            "weight": lambda _: torch.eye(3),
            "bias": lambda _: None,
            "source": lambda _: "h.0",
            "target": lambda _: "h.1",
        },
        finish=lambda _, linear_map: [matlens.MapSet([linear_map])[pair] for pair in [_ends(linear_map)]],
        takes={
            "bias=None": lambda _, maps: maps[0].bias is None,
            "weight=a_tensor": lambda _, maps: torch.equal(maps[0].weight, torch.zeros(2, 2)),
            **{
                f"{end}={name!r}": partial(_has_end, end, name)
                for end in ("source", "target")
                for name in ("h.99", "bogus.1", "attn_out.77")
            },
        },
    ),
    Target(
        "LinearMap.__call__",
        owner=lambda w: w.stream_maps[0, 3],
        takes={f"h={label}": lambda _, mapped: not mapped.isfinite().any() for label in NOT_FINITE},
    ),
    Target("LinearMap.to", {"device": "choice"}, {"device": lambda _: "cpu"}, lambda w: w.stream_maps[0, 3]),
    Target(
        "LinearMap.then",
        {"following": "map"},
        {"following": lambda w: w.stream_maps[1, 3]},
        lambda w: w.stream_maps[0, 1],
    ),
    Target(
        "MapSet",
        {"maps": "object"},
        {"maps": lambda w: [w.stream_maps[0, 3]]},
        takes={f"maps={none}": lambda _, maps: len(maps) == 0 for none in ("[]", "{}")},
    ),
    Target("MapSet.__getitem__", {"pair": "pair"}, {"pair": lambda _: (0, 3)}, lambda w: w.stream_maps),
    Target("MapSet.fit"),
    Target(
        "MapSet.held",
        {"pairs": "pairs", "device": "choice"},
        {"pairs": lambda _: [(0, 3)]},
        lambda w: w.stream_maps,
    ),
    Target("MapSet.save", owner=lambda w: w.stream_maps),
    Target("MapSet.load", {"folder": "path read"}, {"folder": kept("maps")}),
    Target("linear.fit_rows"),
    Target("linear.fit_samples", takes=BACKWARDS),
    Target(
        "linear.fit_stream",
        {"batches": "object"},
        {"batches": lambda w: [dict(w.activations)]},
        takes=BACKWARDS,
    ),
    Target(
        "linear.LeastSquares",
        {"d_in": "count", "d_out": "count", "source": "text", "target": "text"},
        {"d_in": lambda _: 4, "d_out": lambda _: 4},
        takes={  # nothing is held before there are samples, and names are for messages
            **{f"{end}=1000000": lambda _, moments: moments.n == 0 for end in ("d_in", "d_out")},
            **{f"{end}=''": lambda _, moments: moments.n == 0 for end in ("source", "target")},
        },
    ),
    Target(
        "linear.LeastSquares.update",
        {"x": "vectors", "y": "vectors"},
        {"x": lambda w: w.activations[3], "y": lambda w: w.activations[3]},
        lambda w: linear.LeastSquares(32, 32),
    ),
    Target("linear.LeastSquares.merge", {"other": "object"}, {"other": moments_of}, moments_of),
    Target("linear.LeastSquares.solve", owner=moments_of),
    Target(
        "linear.LeastSquares.solution",
        {"intercept": "truth", "ridge": "positive"},
        {"intercept": lambda _: False, "ridge": lambda _: 0.0},
        moments_of,
    ),
    Target(
        "linear.resolve_pairs",
        {"model": "whole"},
        {"model": lambda _: 3},
        takes={"pairs=[('bogus.0', 'h.3')]": lambda _, pairs: pairs == [("bogus.0", "h.3")]},
    ),
    # Activations.
    Target("activations.Activations.__getitem__", owner=lambda w: w.activations),
    Target(
        "activations.Activations.resolve",
        owner=lambda w: w.activations,
        takes={"site='bogus.1'": partial(_is_site, "bogus", 1)},
    ),
    Target("activations.Activations.head", {"n": "whole"}, owner=lambda w: w.activations),
    Target("activations.Activations.load", {"folder": "path read"}, {"folder": kept("activations")}),
    Target("activations.default_batch_tokens"),
    Target("activations.stream", {"positions": "choice"}, {"positions": lambda _: "drawn"}),
    Target("activations.find_sinks"),
    Target(
        "activations.stream_moments",
        {"folder": "path written", "positions": "choice", "shard": "object", "pairs": "object"},
        {"folder": lambda w: w.fresh("moments"), "positions": lambda _: "drawn"},
    ),
    Target(
        "activations.shard_of",
        {"number": "whole", "of": "whole"},
        {"number": lambda _: 1, "of": lambda _: 2},
        takes={  # what is in them is looked at where a model reads them
            f"examples={label}": lambda _, part: part is not None
            for label in ("tokens_past_the_vocabulary", "negative_tokens")
        },
    ),
    Target("activations.outlying_rows", {"norms": "vectors"}, {"norms": lambda w: w.trace.norm}),
    Target("activations.sink_rows"),
    # Corpora.
    Target("data.Corpus.split", owner=lambda w: w.corpus),
    Target("data.Examples.head", {"n": "whole"}, owner=lambda w: w.examples),
    Target(
        "data.Examples.batches",
        {"max_tokens": "whole"},
        {"max_tokens": lambda _: 100},
        lambda w: w.examples,
    ),
    Target("data.is_masked"),
    Target("data.TokenFrequency", {"tokens": "object"}, {"tokens": lambda w: w.examples.tokens}),
    Target("data.TokenFrequency.from_corpus"),
    Target(
        "data.TokenFrequency.shares",
        {"ids": "ids"},
        {"ids": lambda _: np.array([[5, 6], [7, 8]])},
        lambda w: w.frequency,
    ),
    Target(
        "data.read_prompts",
        {"path": "path read", "challenging": "truth"},
        {"path": kept("prompts")},
        takes={"path=a_text": lambda w, prompts: prompts == list(w.sentences)},
    ),
    # Patching.
    Target(
        "patched",
        {"replacements": "object"},
        {"replacements": lambda w: matlens.jump(w.stream_maps, 1, 3)},
        finish=run_in,
        takes={"replacements=[]": lambda w, logits: torch.equal(logits, run_in(w, nullcontext(w.model)))},
    ),
    Target("jump", {**MAPS}, STREAM_MAPS, finish=patch_with),
    *[Target(name, {**RANGE}, finish=patch_with) for name in ("mat_attn", "mat_ffn", "mat_ln1_ln2")],
    Target(
        "patching.stand_ins", {**RANGE, "names": "names"}, {"names": lambda _: ["attn"]}, finish=patch_with
    ),
    Target(
        "patching.Replacement.from_map",
        {"linear": "map"},
        {"linear": lambda w: w.stream_maps[0, 3]},
        finish=lambda w, replacement: patch_with(w, [replacement]),
    ),
    Target(
        "patching.Scheme",
        {"boundaries": "layers", "starts_with": "choice"},
        {"boundaries": lambda _: (0, 1, 3), "starts_with": lambda _: "blocks"},
    ),
    Target("patching.Scheme.replacements", MAPS, STREAM_MAPS, scheme_of, finish=patch_with),
    Target("patching.r2_schemes", {"r2": "vectors"}, {"r2": lambda w: lens.r2_matrix(w.quality, "mat")}),
    Target(
        "patching.r2_score",
        {"scheme": "object", "r2": "object"},
        {"scheme": scheme_of, "r2": lambda w: lens.r2_matrix(w.quality, "mat")},
    ),
    Target("patching.wrr_schemes", {"n_layers": "whole"}),
    Target(
        "patching.attend_nowhere",
        {"first": "layer", "last": "layer", "h": "vectors"},
        {"maps": lambda w: w.maps, "h": lambda w: w.activations[1]},
    ),
    Target(
        "patching.fit_submodules",
        {},
        {"samples": lambda w: w.submodule_activations, "pairs": lambda _: [("ffn_in.0", "ffn_out.0")]},
    ),
    Target(
        "patching.submodule_pairs",
        {"layout": "object", "names": "names"},
        {"layout": lambda w: models.ModelLayout.from_model(w.model), "names": lambda _: ["attn"]},
    ),
    Target(
        "patching.run_variants",
        {"variants": "object"},
        {"variants": lambda w: {"one": patching.Variant(1, matlens.jump(w.stream_maps, 1, 3))}},
    ),
    # Models.
    Target("models.ModelLayout.from_model"),
    *[
        Target(f"models.ModelLayout.{name}", owner=lambda w: models.ModelLayout.from_model(w.model))
        for name in ("resolve", "width", "hook")
    ],
    Target("models.output_layer", {"layer": "layer"}),
    Target("models.ModelIdentity.from_model", {"hash_unembedding": ""}),
    Target(
        "models.ModelIdentity.from_json", {"values": "object"}, {"values": lambda w: identity_of(w).to_json()}
    ),
    Target(
        "models.Provenance.from_json",
        {"values": "object"},
        {"values": lambda w: w.activations.provenance.to_json()},
        takes={"values={}": lambda _, provenance: provenance == models.Provenance()},
    ),
    Target(
        "models.Provenance.check_same",
        {"other": "object", "ours": "", "theirs": ""},
        {"other": lambda w: w.stream_maps.provenance, "ours": lambda _: "the maps"},
        lambda w: w.activations.provenance,
    ),
    Target("models.fingerprint"),
    Target("models.unembed_hash"),
    Target("models.check_raw"),
    Target(
        "models.token_texts",
        {"tokens": "numbers"},
        {"tokens": lambda _: [5, 6]},
        takes={  # a vocabulary may have more rows than a tokenizer has tokens
            "tokens=[99]": lambda _, texts: texts == ["<99>"],
            "tokens=[]": lambda _, texts: texts == [],
        },
    ),
    Target("models.visible", {"token": "text"}, takes={"token=''": lambda _, text: text == ""}),
    Target("models.word_token", {"word": "text"}),
    Target("models.word_tokens"),
    # Storage.
    Target(
        "io.read_config",
        {"folder": "path read", "expected": ""},
        {"folder": kept("maps"), "expected": lambda _: "maps"},
    ),
    Target(
        "io.read_table",
        {"path": "path read", "columns": "", "what": "", "made_by": ""},
        {
            "path": kept("predictions"),
            "columns": lambda _: ["prompt"],
            "what": lambda _: "a table",
            "made_by": lambda _: "The analysis writes it.",
        },
    ),
    # Study.
    Target(
        "study.collect_parts",
        {"positions": "choice", "parts": "object"},
        {"parts": lambda w: w.corpus.split(n_train=40, n_validation=10)},
        takes={"folder=a_folder_of_others": lambda _, parts: len(parts) == 2},
    ),
    Target("study.evaluate_maps", {"folder": "path read"}, {"folder": lambda w: w.study_folder}),
    Target(
        "study.fit_maps",
        {"folder": "path read"},
        {"folder": lambda w: w.study_folder, "pairs": lambda _: "all", "ridge": lambda _: 1.0},
    ),
    Target(
        "study.plot_results",
        {"folder": "path read"},
        {"folder": lambda w: w.study_folder},
        takes={"title=''": lambda _, paths: len(paths) == 4 and all(path.is_file() for path in paths)},
    ),
    Target("study.read_results", {"folder": "path read"}, {"folder": lambda w: w.study_folder}),
    Target("study.slug", {"name": "text"}),
]
