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
# A linear map from each layer to the last one, fitted on a few thousand tokens, shows how much of the final
# representation each layer already determines, and how often it predicts the model's next token.

# %%
import matlens
from matlens import lens, plots

model = matlens.load("smollm2-135m")
train, validation = matlens.load_corpus("wikipedia-sample").split(n_train=3000, n_validation=500)

# %% [markdown]
# Sample one position per sentence and collect the residual stream of every layer there: `vectors["h.12"]`, or
# `vectors[12]`, has one row per sentence.

# %%
vectors = matlens.collect(model, matlens.make_examples(model, train))
held_out = matlens.collect(model, matlens.make_examples(model, validation))

# %% [markdown]
# Fit by least squares without a penalty, from every layer to the last one. This takes seconds.

# %%
maps = matlens.MapSet.fit(vectors, pairs="last")

# %% [markdown]
# Evaluate on other sentences: `mat` is the mapped representation, `id` the unchanged one (the logit lens).

# %%
quality = lens.prediction_quality(matlens.Readout(model), maps, held_out)
print(quality.pivot(index="layer", columns=["metric", "k", "method"], values="value"))

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
# ## Skip blocks
#
# Put the same maps into the model. Blocks 24 to 29 are not computed; the map from layer 24 replaces them at
# every token.

# %%
with matlens.patched(model, matlens.jump(maps, 24, last)):
    print(model.generate("The river flows through", max_new_tokens=8, do_sample=False))
