"""Figures of paper A that matlens itself does not plot."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from figures.looks import REPLACED
from matlens.drawing import (
    DARK,
    DASHED,
    DOTTED,
    GREY,
    SOLID,
    STYLES,
    Look,
    draw_cells,
    draw_line,
    draw_methods,
    examples_of,
    finish,
    layer_axis,
    layer_ticks,
    line_key,
    literal,
    method_looks,
    of_metric,
    percent_ticks,
    precision_axis,
    short_name,
    styled,
    surprisal_axis,
    title_of,
    write_cells,
)
from matlens.plots import plot_layers

_GOAL = 0.95  # Precision@1 at which the layers saved are compared
_ORDER = (  # of schemes
    "WRR, blocks first", "WRR, mat first", "R2", "R2, scored without sinks", "R2 without sinks", "mat", "id",
)  # fmt: skip
_SAVED = {
    "multiplications saved": "saved: blocks", "map multiplications": "spent: maps",
    "readout multiplications": "spent: readouts",
}  # fmt: skip
_FITTED = {
    "all": "fitted on all tokens",
    "not-first": "fitted on all but first tokens",
    "not-sink": "fitted on all but sinks",
}
_WHERE = {
    "mat": "mat",
    "all": "replaced at all tokens",
    "not-first": "at all but the first",
    "not-sink": "at all but sinks",
    "predicted": "only at the predicted token",
}
_MATRICES = {
    "r2": (r"$r^2$", "Blues"),
    "precision": ("Precision@1", "Blues"),
    "surprisal": ("surprisal (nats)", "Blues_r"),
}


def by_method(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal over layers, a line for each method (paper A, Figure 10)."""
    return plot_layers(results[results["k"].isna() | (results["k"] == 1)])


def relative_depth(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal of several models by relative depth (Figures 7 and 8)."""
    results = results[results["k"].isna() | (results["k"] == 1)]
    of_methods, looks = method_looks(results["method"]), dict[str, Look]()
    parts = []
    for number, (model, part) in enumerate(results.groupby("model", sort=False)):
        methods = part["method"].unique()
        names = {method: f"{method}, {short_name(str(model))}" for method in of_methods if method in methods}
        line = STYLES[number % len(STYLES)]
        looks |= {name: of_methods[method]._replace(line=line) for method, name in names.items()}
        parts.append(part.assign(method=part["method"].map(names), depth=part["layer"] / part["target"]))
    corpora = ", ".join(map(short_name, results["corpus"].unique()))
    return plot_layers(
        pd.concat(parts), looks=looks, x="depth", label=r"relative depth $\ell / L$",
        title=literal(f"{corpora}, {examples_of(results)}"),
    )  # fmt: skip


@styled
def across_corpora(results: pd.DataFrame) -> Figure:
    """Precision@1 of maps fitted on each corpus and tested on each (paper A, section 5.2).

    Solid: maps of the tested corpus; dashed: others.
    """
    results = of_metric(results, "precision", 1)
    corpora = list(results["corpus"].unique())
    figure = Figure(figsize=(4.7 * len(corpora), 3.9))
    looks = method_looks(results["method"])
    names = {method: literal(f"mat of {short_name(method.removeprefix('mat of '))}") for method in looks}
    panels = figure.subplots(1, len(corpora), squeeze=False, sharey=True)[0]
    for ax, corpus in zip(panels, corpora, strict=True):
        rows = results[results["corpus"] == corpus]
        for method, look in looks.items():
            line = SOLID if method == f"mat of {corpus}" else DASHED
            draw_line(ax, rows[rows["method"] == method], look._replace(line=line), names[method])
        ax.set_title(literal(f"tested on {short_name(corpus)}"))
        layer_axis(ax, rows["layer"].max())
        precision_axis(ax)
        ax.label_outer()
    keys = [line_key(names[method], look.color, marker=look.marker) for method, look in looks.items()]
    keys += [line_key("tested on their own corpus"), line_key("on another", ls=DASHED)]
    return finish(figure, f"{title_of(results, 'model')}, {examples_of(results)}", keys)


@styled
def transfer_heatmaps(means: pd.DataFrame) -> Figure:
    """r2, Precision@1 and surprisal of each corpus' maps on each corpus, as heatmaps."""
    corpora = list(means["corpus"].unique())
    names = [literal(short_name(corpus)) for corpus in corpora]
    figure = Figure(figsize=(2.2 + 1.35 * len(corpora), 1.9 + 0.36 * len(corpora)))
    panels = figure.subplots(1, 3, sharey=True)
    for ax, (metric, (label, colors)) in zip(panels, _MATRICES.items(), strict=True):
        part = means[(means["metric"] == metric) & (means["k"].isna() | (means["k"] == 1))]
        grid = part.pivot(index="method", columns="corpus", values="value").astype(float)
        grid = grid.loc[[f"mat of {corpus}" for corpus in corpora], corpora]
        low, high = max(float(grid.to_numpy().min()), -1.0), float(grid.to_numpy().max())
        image = draw_cells(ax, grid, cmap=colors, vmin=low, vmax=high, aspect="auto")
        write_cells(ax, image, grid.map("{:.2f}".format), fontsize=6.5)
        for i in range(len(corpora)):
            ax.texts[i * (len(corpora) + 1)].set_weight("bold")  # maps on their own corpus
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
        ax.set_yticks(range(len(names)), names)
        ax.set_xlabel("evaluated on")
        ax.set_title(label)
        ax.label_outer()
    panels[0].set_ylabel("maps fitted on")
    figure.suptitle(f"{title_of(means, 'model')}, means over layers")
    return figure


@styled
def token_table(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Top tokens of each prompt, a column for each method and layer (paper A, Table 1)."""
    columns = max(len(table.columns) for table in tables.values())
    heights = [len(table) + 1 for table in tables.values()]
    figure = Figure(figsize=(1.15 * columns + 0.4, 0.22 * sum(height + 1.5 for height in heights)))
    axes = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (prompt, table) in zip(axes, tables.items(), strict=True):
        ax.set_axis_off()
        ax.set_title(f"Input: {literal(prompt, 'italic')}", fontsize=8, loc="left", style="italic", wrap=True)
        grid = ax.table(
            table.astype(str).map(literal).to_numpy(), colLabels=list(table.columns), bbox=(0, 0, 1, 1),
            cellLoc="left", colLoc="left", edges="horizontal",
        )  # fmt: skip
        grid.auto_set_font_size(False)
        grid.set_fontsize(7.5)
        for (line, _), cell in grid.get_celld().items():
            cell.set_linewidth(0 if line else 0.6)
            cell.set_text_props(weight="normal" if line else "bold")
    return figure


@styled
def alternation(results: pd.DataFrame) -> Figure:
    """Precision@1 of every scheme against the number of blocks that it runs (paper A, Figure 6)."""
    figure = Figure(figsize=(6.6, 4.6))
    ax = figure.subplots()
    results = of_metric(results, "precision", 1)
    order = [name for name in _ORDER if name in set(results["method"])]
    for method, look in method_looks(order).items():
        part = results[results["method"] == method]
        if look.line == "none":
            ax.plot(
                part["layer"], part["value"], look.marker, color=look.color, alpha=0.8, label=method, mew=0,
                ms=4,
            )  # fmt: skip
        else:
            draw_line(ax, part, look, f"{method}, fixed exit" if method in ("mat", "id") else method)
    layer_axis(ax, results["layer"].max(), "blocks run")
    precision_axis(ax)
    return finish(figure, title_of(results), columns=3)


@styled
def attention_heads(results: pd.DataFrame) -> Figure:
    """r2 of every head's map, and Precision@1 by the share of heads replaced."""
    figure = Figure(figsize=(9.4, 4.1))
    left, right = figure.subplots(1, 2)
    scores = results[results["metric"] == "r2"].pivot(index="head", columns="layer", values="value")
    image = draw_cells(left, scores, origin="lower", cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    layer_axis(left, scores.shape[1] - 1, "block")
    left.set_ylabel("head")
    left.set_yticks(layer_ticks(scores.shape[0] - 1))
    figure.colorbar(image, ax=left, extend="min").set_label(r"$r^2$ of the linear map")
    together = of_metric(results[results["share"].notna()], "precision", 1)
    draw_methods(right, together, method_looks(together["method"]), "share")
    right.set_xlabel("share of heads replaced")
    percent_ticks(right.xaxis)
    precision_axis(right)
    return finish(figure, title_of(results), right.get_legend_handles_labels()[0])


@styled
def by_fitting(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal of one replacement, one column per way of fitting.

    Each panel has ``mat`` and a line for each choice of replaced tokens; ``results`` has rows of ``mat``, and
    of methods called ``NAME, fit TOKENS, replace TOKENS``.
    """
    ways = results["method"].str.extract(r"^(?P<name>.+), fit (?P<fitted>.+), replace (?P<replaced>.+)$")
    fits, replaced = (list(ways[column].dropna().unique()) for column in ("fitted", "replaced"))
    figure = Figure(figsize=(1.4 + 3 * len(fits), 6))
    panels = figure.subplots(2, len(fits), squeeze=False, sharex=True, sharey="row")
    looks = method_looks(["mat"]) | {where: REPLACED[where] for where in replaced}
    for (precision, surprisal), fitted in zip(panels.T, fits, strict=True):
        for where, look in looks.items():
            part = results[(ways["fitted"] == fitted) & (ways["replaced"] == where)]
            part = results[results["method"] == "mat"] if where == "mat" else part
            label = _WHERE[where]
            draw_line(precision, of_metric(part, "precision", 1), look, label)
            draw_line(surprisal, of_metric(part, "surprisal"), look, label)
        precision.set_title(_FITTED[fitted])
        precision_axis(precision)
    for surprisal in panels[1]:  # after their shared limits are set
        surprisal_axis(surprisal)
        layer_axis(surprisal, results["layer"].max())
    for ax in panels.flat:
        ax.label_outer()
    names = ", ".join(ways["name"].dropna().unique())
    return finish(figure, f"{literal(names)}: {title_of(results)}", columns=len(looks))


@styled
def early_exit(results: pd.DataFrame) -> Figure:
    """Precision@1 against mean layers run, by early and fixed exit (Figure 9)."""
    figure = Figure(figsize=(5.6, 4.2))
    ax = figure.subplots()
    for method, look in method_looks(("mat", "id")).items():
        rows = results[results["method"] == method]
        draw_line(ax, rows[rows["lam"].notna()], look, f"{method}, early exit")
        draw_line(ax, rows[rows["lam"].isna()], look._replace(line=DOTTED), f"{method}, fixed exit")
    ax.axhline(_GOAL, color=GREY, lw=0.8, zorder=0)
    place = ax.get_yaxis_transform()
    ax.text(0.01, _GOAL, f"{_GOAL:.0%}", transform=place, va="bottom", fontsize=7, color=DARK)
    layer_axis(ax, results["target"].max(), "mean number of layers run")
    precision_axis(ax)
    return finish(figure, title_of(results), columns=2)


@styled
def costs_figure(results: pd.DataFrame) -> Figure:
    """Memory of a fixed exit, and costs and savings of early exit by ``mat``."""
    figure = Figure(figsize=(9.4, 4.1))
    left, right = figure.subplots(1, 2)
    fixed = results[results["layer"].notna()]
    for method, look in method_looks(("mat", "id")).items():
        rows = fixed[fixed["method"] == method].set_index(["metric", "layer"])
        shares = rows["share of bytes"].astype(float)
        kept = 1 - shares.loc["bytes saved"] + shares.loc["bytes of maps"]
        left.plot(
            kept, rows["value"].loc["precision"], look.line, color=look.color, marker=look.marker,
            label=f"{method}, fixed exit",
        )  # fmt: skip
    left.set_xlabel("bytes of the blocks run and the map")
    percent_ticks(left.xaxis)
    precision_axis(left)
    early = results[results["layer"].isna() & (results["method"] == "mat")]
    for metric, look in method_looks(_SAVED).items():
        rows = early[early["metric"] == metric].sort_values("k")
        right.plot(
            rows["k"].astype(float), rows["share of multiplications"].astype(float), look.line,
            color=look.color, marker=look.marker, label=f"{_SAVED[metric]}, early exit",
        )  # fmt: skip
    right.set_xlabel("required Precision@1")
    right.set_ylabel("multiplications, share of all blocks")
    right.set_ylim(bottom=0)
    for axis in (right.xaxis, right.yaxis):
        percent_ticks(axis)
    return finish(figure, title_of(results), [*left.get_lines(), *right.get_lines()], columns=3)


@styled
def training_curves(table: pd.DataFrame) -> Figure:
    """Training and held-out losses by update, for each model of `training_table`."""
    losses = table[table["metric"] == "loss"]
    figure = Figure(figsize=(5.2, 3.2))
    ax = figure.add_subplot()
    for number, (model, part) in enumerate(losses.groupby("model", sort=False)):
        for method, dashes in (("training", DASHED), ("held-out", SOLID)):
            curve = part[part["method"] == method].astype({"k": float}).sort_values("k")
            label = literal(f"{short_name(str(model))}, {method}")
            ax.plot(curve["k"], curve["value"], ls=dashes, color=f"C{number}", label=label)
    ax.set_xlabel("update")
    ax.set_ylabel("loss (nats per token)")
    ax.legend()
    figure.suptitle(literal(str(losses["corpus"].iloc[0])))
    return figure
