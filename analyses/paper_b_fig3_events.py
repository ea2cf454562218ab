"""Paper B, Table 4, Figure 3, Tables 9 and 10: promotion and elimination by FFNs.

Scores of the ten dominant sub-updates for the predicted token where it is made (saturation), and for the top
candidate where it falls furthest (elimination); the same for the top candidate by layer; and how often
predictions are made at each layer. Expect a larger maximum at saturation than at elimination, a mean near
zero at elimination, and far smaller scores of random sub-updates. The paper uses WikiLM and
``--model gpt2-medium`` with 2,000 sentences.

The first two tables have the score as defined, and two readings without the part that is constant over
tokens and changes no probability: ``lift``, relative to the vocabulary mean, and ``odds``, relative to
the rival. Rows of ``sinks excluded`` exclude examples at attention sinks. Scores by effect of the update
are in a separate table. The trace is stored in the output folder and reused by other analyses.
"""

from __future__ import annotations

from figures.paper_b import events_figure, layers_figure, saturation_figure
from studies import Report, Study, run_study
from sub_updates.events import event_tables

from matlens.errors import PositiveInt

EVENTS, LAYERS, BY_EFFECT = "paper_b_table4_events", "paper_b_fig3_scores", "paper_b_fig3_by_effect"
SATURATION = "paper_b_table9_saturation"


def main(study: Study, report: Report, dominant: PositiveInt = 10) -> None:
    """Trace FFN updates over a corpus; score saturation and elimination events."""
    trace = study.trace(dominant)
    tables = event_tables(trace, study.model)
    scores = tables.scores[tables.scores["read"] == "score"]
    origin = study.trace_origin(trace)
    report.write(EVENTS, tables.events, origin, events_figure(tables.events))
    report.write(LAYERS, tables.scores, origin, layers_figure(scores))
    chosen = (scores["method"] == "dominant") & scores["metric"].isin(("max", "mean", "min"))
    report.write(BY_EFFECT, scores[chosen].drop(columns="read"), origin)
    report.write(SATURATION, tables.saturation, origin, saturation_figure(tables.saturation))


if __name__ == "__main__":
    run_study(main, sentences=2000)
