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
# # What do the layers of a model already know?
#
# A map from each layer to the last, fitted on a few thousand tokens, says how much of the model's final
# representation is a linear function of what is there after so many blocks, and how often the token that
# the model will say can be read off it.

# %%
import matlens
from matlens import lens, plots

model = matlens.load("smollm2-135m")
train, validation = matlens.load_corpus("wikipedia-sample").split(n_train=3000, n_validation=500)

# %% [markdown]
# One position is drawn in each sentence, and the stream of every layer is kept there: `vectors["h.12"]`, or
# `vectors[12]`, has a row a sentence.

# %%
vectors = matlens.collect(model, matlens.make_examples(model, train))
held_out = matlens.collect(model, matlens.make_examples(model, validation))

# %% [markdown]
# The fit itself takes seconds: least squares without penalty, from every layer to the last.

# %%
maps = matlens.MapSet.fit(vectors, pairs="last")

# %% [markdown]
# How well do the mapped representations stand in for the last one, on sentences that were not fitted? `mat`
# is the map, `id` the representation as it is (the logit lens).

# %%
quality = lens.prediction_quality(matlens.Readout(model), maps, held_out)
print(lens.layer_table(quality))

# %%
figure = plots.plot_layers(quality)

# %% [markdown]
# ![Precision and surprisal over layers](../images/paper_a_fig4_next_token.png)
#
# ## One sentence, layer by layer

# %%
readout, last = matlens.Readout(model), model.cfg.n_layers
h = matlens.collect(model, matlens.make_prompts(model, ["The Eiffel Tower stands in the city of"]))
for layer in range(0, last, 5):
    print(layer, [token for token, _ in readout.top_tokens(maps[layer, last](h[layer][0]))])

# %% [markdown]
# ## Leaving blocks out
#
# The same maps can be put into the model. Here the blocks 24 to 29 are not computed; `mat` of layer 24
# takes their place at every token.

# %%
with matlens.patched(model, matlens.jump(maps, 24, last)):
    print(model.generate("The river flows through", max_new_tokens=8, do_sample=False))
