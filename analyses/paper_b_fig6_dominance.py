"""Paper B, Figure 6: how much of an FFN's update comes from its ten dominant sub-updates.

The share of the ten sub-updates with the largest ``|m_i| ||v_i||`` at every layer, and of ten random ones, at
one drawn position of each sentence. Expect the dominant ones to hold 5% to 10% and more of the whole, the
random ones ``10 / d_mlp``. The table also has how many of the ten have negative coefficients, which turn
their vectors round (A.3). The paper's figure is ``--model gpt2-medium``, 2,000 sentences.
"""

from __future__ import annotations

from figures.paper_b import shares_by_layer
from studies import Dominant, Report, Study, run_study
from sub_updates import dominance

NAME = "paper_b_fig6_dominance"


def main(study: Study, report: Report, dominant: Dominant = 10) -> None:
    """Measure the share of the dominant sub-updates over a corpus, and draw it layer by layer."""
    examples = study.validation_examples
    table = dominance(study.model, examples, k=dominant, seed=study.seed)
    origin = study.origin_of_weights | {"data": examples.provenance}
    shares = table[table["metric"] == "share"]
    report.write(NAME, table, origin, shares_by_layer(shares, f"share of {dominant} sub-updates"))


if __name__ == "__main__":
    run_study(main, sentences=2000)
