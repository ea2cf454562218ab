"""Faults that once passed all tests when put into the analyses: each must be detected.

The rules of `mutating` do not make all of them, such as maps of another fit, the r2 of another method, or
a missing baseline.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from mutating import Mutant


class NamedFault(NamedTuple):
    """A fault by its name: what the module's text is, and what it becomes."""

    name: str
    module: str
    before: str
    after: str


_FAULTS = {
    "paper_a_fig6_alternation": {
        "maps of the wrong fit used for a variant": (
            "((study.maps, True), (study.maps_without_sinks, False))",
            "((study.maps, True), (study.maps, False))",
        ),
        "R2 from the r2 of `id`": (
            '(quality["metric"] == "r2") & (quality["method"] == "mat")',
            '(quality["metric"] == "r2") & (quality["method"] == "id")',
        ),
        "the sink mask inverted where schemes are scored": (
            "others = ~sink_rows(validation)", "others = sink_rows(validation)",
        ),
    },
    "paper_a/submodules": {
        "replacements of the wrong fit used for a variant": (
            "replace(fits[case.fitted], case.layer, target,", 'replace(fits["all"], case.layer, target,',
        ),
    },
    "attention_heads": {
        "the sink mask inverted where heads are replaced": (
            "where = ~find_sinks(model, data.examples)", "where = find_sinks(model, data.examples)",
        ),
    },
    "sub_updates/events": {
        "`lift` exchanged for the score": (
            '"score": trace.score, "lift": lift,', '"score": lift, "lift": trace.score,',
        ),
    },
    "control/comparison": {
        "the coefficient ignored in control": (
            "return controlled(model, self.names, self.coefficient)",
            "return controlled(model, self.names, 3.0)",
        ),
        "perplexity without Self-Debiasing": (
            "return debiased_losses(model, texts, self.processor)", "return text_losses(model, texts)",
        ),
    },
    "control/selection": {
        "the worst word vectors taken for the best": ('["value"].head(n)', '["value"].tail(n)'),
    },
    "ffn/perplexity": {
        "the standard deviation of the population in the interval of a perplexity": (
            "np.std(total - mean * n_tokens, ddof=1)", "np.std(total - mean * n_tokens, ddof=0)",
        ),
    },
    "pruning/folding": {
        "a later block fitted on the original stream, not on the changed model's": (
            "fold_block(streams, index, block, h, target(index), method, penalty)",
            "fold_block(streams, index, block, streams.h[index], target(index), method, penalty)",
        ),
    },
}  # fmt: skip
NAMED = tuple(
    NamedFault(name, module, *texts) for module, faults in _FAULTS.items() for name, texts in faults.items()
)


def faulty(fault: NamedFault, source: str) -> Mutant:
    """A module with a named fault.

    Raises
    ------
    ValueError
        If the replaced text is not in the module exactly once.
    """
    if source.count(fault.before) != 1:
        raise ValueError(
            f"{fault.module} must have {fault.before!r} once for the fault {fault.name!r}, got it "
            f"{source.count(fault.before)} times."
        )
    start = source.index(fault.before)
    changed = source.replace(fault.before, fault.after)
    line = source.count("\n", 0, start) + 1
    statement = next(
        node for node in reversed(ast.parse(changed).body) if node.lineno <= line
    )  # a decorator belongs to what it decorates, and none is changed
    return Mutant(line, f"named: {fault.name}", changed, ast.get_source_segment(changed, statement) or "")
