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
# # What feed-forward layers write
#
# An FFN adds up its value vectors, each times a coefficient. Read in the vocabulary, some of them promote
# one concept; they decide what the model says, and they can be turned on.

# %%
import matlens
from matlens import ffn

model = matlens.load("smollm2-135m")
values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)

# %% [markdown]
# ## What one promotes

# %%
table = ffn.token_table(values, projection, ["L29D186", "L29D99"])
print(table.to_string(index=False))

# %% [markdown]
# And the other way round, which of all of them raise a word most:

# %%
print(ffn.values_promoting(values, projection, ["␣wine"], n=5).to_string(index=False))

# %% [markdown]
# ## What they write for a prompt
#
# The update of a layer taken apart: the sub-updates that contribute most, and what each promotes.

# %%
prompt = matlens.make_prompts(model, ["The Eiffel Tower stands in the city of"])
updates = ffn.Updates.run(model, prompt, layers=[24])
table = ffn.dominant_table(updates, projection, k=5, n_tokens=4)
print(table[["value", "coefficient", "share", "promoted"]].to_string(index=False))

# %% [markdown]
# ## Who makes a prediction
#
# A trace holds the top candidate before and after every FFN for many sentences. Events are read off it:
# where the prediction was made, and where a candidate was pushed down. Sinks among the examples are left
# out.

# %%
_, sentences = matlens.load_corpus("wikipedia-sample").split(n_train=1, n_validation=100)
trace = ffn.Trace.run(model, matlens.make_examples(model, sentences))
scores = ffn.event_scores(trace, rows=~trace.sinks)
print(scores[["experiment", "method", "metric", "value", "low", "high", "n"]].to_string(index=False))

# %% [markdown]
# ## Turning some of them on
#
# `L20D630` promotes thanks, `L18D748` what is safe and fair.

# %%
with ffn.controlled(model, ["L20D630", "L18D748"], 3.0):
    print(model.generate("Shut up, you", max_new_tokens=20, do_sample=False))
