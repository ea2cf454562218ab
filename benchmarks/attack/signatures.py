"""Cases of the Python API: every public name, with each of its parameters bad in turn and the others good."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import matlens
from attack.badness import KINDS, Bad
from attack.cases import Case, exhaust
from attack.meaning import meaning
from attack.world import World

Good = Callable[[World], Any]
OF_EACH = (
    "progress",
    "use_cache",
    "provenance",
    "trust_remote_code",
    "origin",
    "device",
    "dtype",
    "revision",
)


@dataclass(frozen=True)
class Target:
    """A public name that is called.

    Attributes
    ----------
    name
        Where it is, such as ``ffn.Trace.run``.
    kinds
        By parameter, the kinds of what is bad for it, with a comma between; empty for what is left out.
    good
        By parameter, a good argument where the one that parameters of this name have is not.
    owner
        Gives the object that a method is called on.
    finish
        Does with the result what a user would do next, where nothing happens before.
    takes
        By what the library may take though it is unusual, such as ``text='h.99'``, or by a parameter for all
        of its values: whether what comes of it is right.
    """

    name: str
    kinds: Mapping[str, str] = field(default_factory=dict)
    good: Mapping[str, Good] = field(default_factory=dict)
    owner: Good | None = None
    finish: Callable[[World, Any], Any] | None = None
    takes: Mapping[str, Callable[[World, Any], bool]] = field(default_factory=dict)

    def function(self, world: World) -> Callable[..., Any]:
        """What is called."""
        path = self.name.split(".")
        if self.owner is not None:
            return getattr(self.owner(world), path[-1])
        found: Any = matlens
        for part in path:
            found = getattr(found, part)
        return found

    def parameters(self, world: World) -> list[inspect.Parameter]:
        """Its parameters."""
        return [
            parameter
            for parameter in inspect.signature(self.function(world)).parameters.values()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]

    def arguments(self, world: World) -> dict[str, Any]:
        """Good arguments, made anew."""
        arguments = {}
        for parameter in self.parameters(world):
            if parameter.name in self.good:
                arguments[parameter.name] = self.good[parameter.name](world)
            elif parameter.name == "progress":
                arguments["progress"] = False
            elif parameter.default is parameter.empty:
                arguments[parameter.name] = GOOD[parameter.name](world)
        return arguments

    def call(self, world: World, **changed: Any) -> Any:
        """Call it with good arguments but for those that are changed, and do what a user would do next."""
        result = self.function(world)(**self.arguments(world) | changed)
        return exhaust(result) if self.finish is None else self.finish(world, result)

    def bad(self, world: World) -> Iterator[tuple[str, Bad]]:
        """Each parameter with each of what is bad for it."""
        for parameter in self.parameters(world):
            if parameter.name in OF_EACH and parameter.name not in self.kinds:
                continue
            kinds = self.kinds.get(parameter.name, KIND_OF.get(parameter.name))
            if kinds is None:
                print(f"nothing is known to be bad for {parameter.name} of {self.name}")
                continue
            for kind in filter(None, kinds.split(",")):
                for bad in KINDS[kind.strip()]:
                    if bad.label != "None" or parameter.default is not None:
                        yield parameter.name, bad

    def cases(self, world: World) -> Iterator[Case]:
        """A case for each bad argument."""
        for name, bad in self.bad(world):

            def run(name: str = name, bad: Bad = bad) -> Any:
                return self.call(world, **{name: bad.make(world)})

            def same(result: Any) -> bool:
                return meaning(result) == meaning(self.call(world))

            taken = self.takes.get(f"{name}={bad.label}", self.takes.get(name))
            right = partial(taken, world) if taken else same if bad.same else None
            yield Case(bad.fault, f"{self.name}({name}={bad.label})", run, right)


def _constant(value: Any) -> Good:
    return lambda _: value


GOOD: dict[str, Good] = {
    "model": lambda w: w.model,
    "tokenizer": lambda w: w.model.tokenizer,
    "corpus": lambda w: w.corpus,
    "examples": lambda w: w.examples,
    "activations": lambda w: w.activations,
    "samples": lambda w: w.activations,
    "validation": lambda w: w.activations,
    "data": lambda w: w.activations,
    "prompts": lambda w: list(w.sentences[:2]),
    "sentences": lambda w: w.sentences,
    "maps": lambda w: w.maps,
    "readout": lambda w: w.readout,
    "values": lambda w: w.values,
    "projection": lambda w: w.projection,
    "lens": lambda w: w.lens,
    "lenses": lambda w: {"mat": w.lens},
    "members": lambda w: w.members,
    "windows": lambda w: w.windows,
    "pruned": lambda w: w.pruned,
    "prompt": lambda w: w.sentences[0],
    "methods": _constant(["mat"]),
    "trace": lambda w: w.trace,
    "clusters": lambda w: w.clusters,
    "updates": lambda w: w.updates,
    "tokens": lambda w: w.tokens,
    "truth": lambda w: w.activations[3],
    "h": lambda w: w.activations[3],
    "vectors": lambda w: w.activations[3],
    "results": lambda w: w.quality,
    "table": lambda w: w.quality,
    "sample": lambda w: w.sample,
    "losses": lambda w: w.losses,
    "unchanged": lambda w: w.losses,
    "positions": lambda w: w.examples.positions,
    "confidence": lambda w: w.confidence,
    "word_similarity": lambda w: w.similarity,
    "frequency": lambda w: w.frequency,
    "sites": _constant(["h.0", "h.3"]),
    "site": _constant("h.3"),
    "names": _constant(["L0D1", "L1D2"]),
    "name": _constant("L0D1"),
    "words": _constant(["w1", "w2"]),
    "layers": _constant([0, 3]),
    "numbers": _constant([0, 1]),
    "layer": _constant(1),
    "first": _constant(1),
    "last": _constant(3),
    "n": _constant(3),
    "k": _constant(3),
    "row": _constant(1),
    "pairs": _constant([("h.0", "h.3")]),
    "first_token": _constant(0),
    "n_layers": _constant(3),
    "text": _constant("h.3"),
    "source": lambda w: str(w.text),
    "folder": lambda w: w.fresh("out"),
    "path": lambda w: w.text,
    "d_vocab": _constant(60),
    "word": _constant("w1"),
    "token": _constant(" w1"),
    "method": _constant("mat"),
    "title": _constant("A title"),
    "label": _constant("A label"),
    "style": _constant("normal"),
    "n_train": _constant(30),
    "n_validation": _constant(10),
}

KIND_OF: dict[str, str] = {
    "model": "model",
    "tokenizer": "tokenizer",
    "corpus": "corpus",
    "examples": "examples",
    "activations": "activations",
    "samples": "activations",
    "validation": "activations",
    "data": "activations",
    "prompts": "texts",
    "sentences": "sentences",
    "maps": "maps",
    "readout": "readout",
    "values": "values",
    "projection": "projection",
    "lens": "lens",
    "lenses": "lenses",
    "members": "object",
    "windows": "windows",
    "pruned": "pruned",
    "prompt": "prompt",
    "methods": "methods",
    "trace": "trace",
    "clusters": "clusters",
    "updates": "object",
    "tokens": "object",
    "truth": "vectors",
    "h": "any vectors",
    "vectors": "vectors",
    "results": "table",
    "table": "table",
    "sample": "table",
    "losses": "object",
    "unchanged": "object",
    "confidence": "object",
    "word_similarity": "object",
    "frequency": "object",
    "sites": "sites",
    "site": "site",
    "names": "names",
    "name": "name",
    "words": "words",
    "layers": "layers",
    "numbers": "numbers",
    "layer": "layer",
    "first": "layer",
    "last": "layer",
    "n": "count",
    "k": "count",
    "row": "row",
    "pairs": "pairs",
    "n_layers": "whole",
    "text": "text",
    "source": "text",
    "folder": "path written",
    "path": "path read",
    "d_vocab": "whole",
    "word": "text",
    "token": "text",
    "method": "choice",
    "title": "text",
    "label": "text",
    "seed": "seed",
    "batch_tokens": "whole",
    "batch_size": "whole",
    "ridge": "positive",
    "intercept": "truth",
    "draw_special": "truth",
    "same_precision": "truth",
    "weights": "weights",
    "places": "object",
    "linkage": "choice",
    "disk": "positive",
    "n_beams": "whole",
    "n_vectors": "whole",
    "heads": "layers",
    "most": "whole",
    "size": "whole",
    "limit": "whole",
    "field": "text",
    "split": "text",
    "n_tokens": "count",
    "n_random": "whole",
    "memory": "positive",
    "overlap": "choice",
    "factor": "positive",
    "where": "where",
    "rows": "rows",
    "threshold": "number",
    "scores": "object",
    "per_layer": "count",
    "style": "choice",
    "n_train": "count",
    "n_validation": "count",
    "pair": "pair",
    "n_samples": "whole",
    "processor": "object",
    "debiasing": "object",
    "n_clusters": "count",
    "folds": "whole",
    "fewest": "whole",
    "strengths": "object",
    "kinds": "object",
    "others": "choice",
    "seeds": "whole",
    "skip": "",
    "window": "whole",
    "dimensions": "whole",
    "min_count": "whole",
    "value": "number",
    "lam": "number",
    "n_words": "whole",
    "stack": "choice",
    "gradients": "truth",
    "sources": "object",
    "divided": "truth",
    "divergence": "truth",
    "every": "whole",
    "keep_rows": "truth",
    "n_prompts": "whole",
    "proceed": "object",
    "expert": "row",
    "per_second": "positive",
    "retries": "whole",
    "backoff": "positive",
}


def working(target: Target, world: World) -> str | None:
    """What is wrong with a target's own good arguments, if anything."""
    try:
        target.call(world)
    except Exception as error:
        return f"{target.name} refuses good arguments: {type(error).__name__}: {error}"
    return None
