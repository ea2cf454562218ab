"""Small models of every block family, with random weights, as the folders that `matlens.load` reads."""

from __future__ import annotations

import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub.constants
import jaxtyping
import numpy as np
import pytest
import shapes  # noqa: F401  # before matlens: says which of its functions are checked
import torch
import transformers
from hub_stand_in import Hub
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import matlens
from matlens.models import places, tokens

# No test depends on how busy the machine is.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")

# Tokenizers of few words are told apart by their own pieces, each time that a model is identified.
tokens._SAMPLED, ALL_SAMPLED = 6, tokens._SAMPLED

WORDS = [f"w{i}" for i in range(50)]
SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
BERT_SPECIAL = SPECIAL | {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
N_LAYERS, D_MODEL, N_CTX = 3, 32, 48
N_DEEP = 6  # layers of "llama-deep", which has room for several spans

_COMMON: dict[str, Any] = {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
_MIN: dict[str, Any] = _COMMON | {
    "hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "num_attention_heads": 4,
}  # fmt: skip
_SIZES = _MIN | {"intermediate_size": 48, "max_position_embeddings": N_CTX}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_GPT: dict[str, Any] = _COMMON | {"n_layer": N_LAYERS, "n_embd": D_MODEL, "n_head": 4, "n_positions": N_CTX}
_ALIBI = _MIN | {"alibi": True, "bias": True}
_OPT = _MIN | {"max_position_embeddings": N_CTX, "ffn_dim": 48}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = _GROUPED | _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
RESIDUAL_MULTIPLIER = 0.5  # of Granite: by what attention's and the FFN's output are multiplied


def _sites(post: str, mid: str | None, **modules: str) -> dict[str, tuple[str, str]]:
    """Which module of a layer has which site as its input or output."""
    ends = {f"{kind}_{side}": (path, side) for kind, path in modules.items() for side in ("in", "out")}
    return ends | ({} if mid is None else {"mid": (mid, "in")}) | {"ffn_post": (post, "in")}


class Architecture(NamedTuple):
    """A small model's configuration, and where the plain model has its layers, its final norm and its sites.

    Written by hand from the source of transformers; tests hook these and compare.
    """

    config: Callable[[], transformers.PretrainedConfig]
    layers: str = ""
    final_norm: str = ""
    sites: dict[str, tuple[str, str]] | None = None


_OF_LLAMA = ("model.layers", "model.norm")
_OF_GPT2 = ("transformer.h", "transformer.ln_f")
_LLAMA = _sites(
    "mlp.down_proj", "post_attention_layernorm", ln1="input_layernorm", attn="self_attn",
    ln2="post_attention_layernorm", ffn="mlp",
)  # fmt: skip
# No module of a plain mixture of experts begins or ends at its coefficients; tests/models compute them.
_MIXTURE = {kind: end for kind, end in _LLAMA.items() if kind != "ffn_post"}
_GEMMA = _sites(
    "mlp.down_proj", "pre_feedforward_layernorm", ln1="input_layernorm", attn="self_attn",
    ln1_post="post_attention_layernorm", ln2="pre_feedforward_layernorm", ffn="mlp",
    ln2_post="post_feedforward_layernorm",
)  # fmt: skip
_BERT = {
    **_sites("output.dense", None, ln1="attention.output.LayerNorm", ln2="output.LayerNorm"),
    "attn_in": ("attention", "in"), "attn_out": ("attention.output.dense", "out"),
    "mid": ("attention.output.LayerNorm", "out"), "ffn_in": ("intermediate", "in"),
    "ffn_out": ("output.dense", "out"),
}  # fmt: skip
_FALCON_POST = "mlp.dense_4h_to_h"

SMALL: dict[str, Architecture] = {
    "gpt2": Architecture(
        lambda: transformers.GPT2Config(**_GPT), *_OF_GPT2,
        _sites("mlp.c_proj", "ln_2", ln1="ln_1", attn="attn", ln2="ln_2", ffn="mlp"),
    ),
    "llama": Architecture(lambda: transformers.LlamaConfig(**_GROUPED), *_OF_LLAMA, _LLAMA),
    "neox": Architecture(
        lambda: transformers.GPTNeoXConfig(**_SIZES), "gpt_neox.layers", "gpt_neox.final_layer_norm",
        _sites("mlp.dense_4h_to_h", None, ln1="input_layernorm", attn="attention",
               ln2="post_attention_layernorm", ffn="mlp"),
    ),
    "gptj": Architecture(
        lambda: transformers.GPTJConfig(**_GPT, rotary_dim=4), *_OF_GPT2,
        _sites("mlp.fc_out", None, ln1="ln_1", attn="attn", ffn="mlp"),
    ),
    "bert": Architecture(
        lambda: transformers.BertConfig(**_SIZES), "bert.encoder.layer", "cls.predictions", _BERT
    ),
    # A cap that the random logits reach, so that leaving it out would show.
    "gemma2": Architecture(
        lambda: transformers.Gemma2Config(**_GROUPED, final_logit_softcapping=0.05), *_OF_LLAMA, _GEMMA
    ),
    "gemma3": Architecture(
        lambda: transformers.Gemma3TextConfig(**_GROUPED, sliding_window=16), *_OF_LLAMA, _GEMMA
    ),
    "granite": Architecture(
        lambda: transformers.GraniteConfig(
            **_GROUPED, residual_multiplier=RESIDUAL_MULTIPLIER, logits_scaling=4.0
        ),
        *_OF_LLAMA, _LLAMA,
    ),
    "olmo2": Architecture(
        lambda: transformers.Olmo2Config(**_SIZES, num_key_value_heads=2), *_OF_LLAMA,
        _sites("mlp.down_proj", "mlp", attn="self_attn", ln1_post="post_attention_layernorm", ffn="mlp",
               ln2_post="post_feedforward_layernorm"),
    ),
    # Its attention and its FFN add the stream themselves, so only the stream is known.
    "bloom": Architecture(
        lambda: transformers.BloomConfig(**_COMMON, hidden_size=D_MODEL, n_layer=N_LAYERS, n_head=4),
        *_OF_GPT2,
    ),
    # With distances in attention, which transformers counts twice where it is asked for attention's patterns;
    # attention and FFN one after the other, and side by side.
    "falcon-alibi": Architecture(
        lambda: transformers.FalconConfig(**_ALIBI, multi_query=False, parallel_attn=False), *_OF_GPT2,
        _sites(_FALCON_POST, "post_attention_layernorm", ln1="input_layernorm", attn="self_attention",
               ln2="post_attention_layernorm", ffn="mlp"),
    ),
    "falcon-alibi-multi-query": Architecture(
        lambda: transformers.FalconConfig(**_ALIBI, multi_query=True), *_OF_GPT2,
        _sites(_FALCON_POST, None, ln1="input_layernorm", attn="self_attention", ffn="mlp"),
    ),
    # As falcon-40b: groups of heads, each with a key and a value.
    "falcon-new": Architecture(
        lambda: transformers.FalconConfig(
            **_MIN | {"num_attention_heads": 8}, num_kv_heads=2, new_decoder_architecture=True, bias=True
        ),
        *_OF_GPT2, _sites(_FALCON_POST, None, ln1="ln_attn", attn="self_attention", ln2="ln_mlp", ffn="mlp"),
    ),
    # Its blocks give lists.
    "gpt1": Architecture(
        lambda: transformers.OpenAIGPTConfig(**_GPT), "transformer.h", "lm_head",
        _sites("mlp.c_proj", "mlp", ln1="ln_1", attn="attn", ln2="ln_2", ffn="mlp"),
    ),
    "cohere": Architecture(
        lambda: transformers.CohereConfig(**_SIZES, num_key_value_heads=2, logit_scale=0.25), *_OF_LLAMA
    ),
    "roberta": Architecture(
        lambda: transformers.RobertaConfig(**_SIZES), "roberta.encoder.layer", "lm_head", _BERT
    ),
    # Mixtures of experts: the second has one that all tokens share, the third linear attention in two layers,
    # which keeps a state in the place of keys and values, the fourth output biases.
    "olmoe": Architecture(lambda: transformers.OlmoeConfig(**_SIZES, **_EXPERTS), *_OF_LLAMA, _MIXTURE),
    "qwen2-moe": Architecture(lambda: transformers.Qwen2MoeConfig(**_SHARED_EXPERT), *_OF_LLAMA, _MIXTURE),
    "qwen3-next": Architecture(
        lambda: transformers.Qwen3NextConfig(
            **_SHARED_EXPERT, layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        *_OF_LLAMA,
    ),
    "gpt-oss": Architecture(
        lambda: transformers.GptOssConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2), *_OF_LLAMA,
        _MIXTURE,
    ),
    "t5": Architecture(
        lambda: transformers.T5Config(
            **_COMMON | {"pad_token_id": 0}, d_model=D_MODEL, d_kv=8, d_ff=48, num_heads=4,
            num_layers=N_LAYERS, num_decoder_layers=2, decoder_start_token_id=0,
        )
    ),
    "vit": Architecture(
        lambda: transformers.ViTConfig(
            hidden_size=D_MODEL, num_hidden_layers=N_LAYERS, num_attention_heads=4, intermediate_size=48,
            image_size=12, patch_size=4, num_labels=5,
        )
    ),
    "llama-sinks": Architecture(lambda: transformers.LlamaConfig(**_GROUPED), *_OF_LLAMA, _LLAMA),
    "llama-deep": Architecture(
        lambda: transformers.LlamaConfig(**_GROUPED | {"num_hidden_layers": N_DEEP}), *_OF_LLAMA
    ),
    "llama-tied": Architecture(
        lambda: transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True), *_OF_LLAMA
    ),
    "opt": Architecture(lambda: transformers.OPTConfig(**_OPT, word_embed_proj_dim=D_MODEL)),
    # As OPT-350m: norms behind, no final norm, and embeddings that are narrower than the stream.
    "opt-narrow": Architecture(
        lambda: transformers.OPTConfig(**_OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
        "model.decoder.layers", "model.decoder.project_out",
    ),
}  # fmt: skip
LAYERS = {name: (small.layers, small.final_norm) for name, small in SMALL.items()}
SITE_MODULES = {name: small.sites for name, small in SMALL.items() if small.sites}
WIRING_OF = {
    "gpt2": "pre-norm", "llama": "pre-norm", "neox": "parallel", "gptj": "parallel", "bert": "post-norm",
    "gemma2": "extra-norm", "gemma3": "extra-norm", "granite": "scaled", "olmo2": "output-norm",
}  # fmt: skip
WIRINGS = tuple(WIRING_OF)
# Other kinds of models, whose wirings are among these.
KINDS = {
    "roberta": "post-norm", "olmoe": "pre-norm", "qwen2-moe": "pre-norm", "gpt-oss": "pre-norm",
    "gpt1": "post-norm", "falcon-alibi": "pre-norm", "falcon-alibi-multi-query": "parallel",
    "falcon-new": "parallel",
}  # fmt: skip
APART = {"olmoe": ("ffn_post",), "qwen2-moe": ("ffn_post",)}  # sites at which no plain module ends
SCALED_SITES = {"granite": ("attn_out", "ffn_out")}  # what is multiplied before it is added
SINK_TOKENS = (5, 9)  # of "llama-sinks", whose embeddings are as much longer than others as sinks are
MASKED = ("bert", "roberta")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """A cache of this run alone, which the processes of one run share; the user's is left as it is."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "matlens-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATLENS_CACHE", str(folder))
        # Booting a bridge of a multimodal model would install torchvision, with another torch.
        for variable in ("PIP_NO_INDEX", "UV_OFFLINE"):
            patch.setenv(variable, "1")
        yield folder


@pytest.fixture(scope="module", autouse=True)
def _threads(request):
    """One thread for small models: on a busy machine more take several times as long."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("real") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _shapes(request, monkeypatch):
    """Shapes of arrays are checked in every call, but where a test is about input that is refused."""
    if request.node.get_closest_marker("refused") is not None:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def _hub():
    """Each test asks the hub itself."""
    places._on_hub.cache_clear()


def make_tokenizer(*, bert: bool = False) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words; BERT's puts [CLS] before and [SEP] after, the others add nothing."""
    special = BERT_SPECIAL if bert else SPECIAL
    vocabulary = {word: i for i, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bert:
        ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=N_CTX, **special)


def _auto(name: str) -> Any:
    if name == "t5":
        return transformers.AutoModelForSeq2SeqLM
    if name == "vit":
        return transformers.AutoModelForImageClassification
    return transformers.AutoModelForMaskedLM if name in MASKED else transformers.AutoModelForCausalLM


def save_model(name: str, folder: Path) -> Path:
    """Write a small model with random weights and its tokenizer, as save_pretrained does."""
    torch.manual_seed(0)
    model = _auto(name).from_config(SMALL[name].config())
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start as ones and zeros, where a forgotten one would not show.
            parameter.add_(0.02 * torch.randn_like(parameter))
        if name == "llama-sinks":
            model.get_input_embeddings().weight[list(SINK_TOKENS)] *= 60
    model.save_pretrained(folder)
    make_tokenizer(bert=name in MASKED).save_pretrained(folder)
    return folder


def save_with_ends(folder: Path, *, front: bool = False, end: bool = False) -> Path:
    """A small model whose tokenizer has a BOS and an EOS, and puts them around a text or not."""
    save_model("gpt2", folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w48"})
    if front or end:
        template = f"{'w49 ' if front else ''}$A{' w48' if end else ''}"
        ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("w49", "w48")]
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Folder of a small model, by the name of its architecture."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.is_dir() else save_model(name, path)

    return folder


@pytest.fixture(scope="session")
def small_model(model_folder):
    """A small loaded model, by the name of its architecture; shared, so leave it as it is."""
    loaded: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in loaded:
            with torch.inference_mode(False):
                loaded[name] = matlens.load(str(model_folder(name)), device="cpu")
        return loaded[name]

    return model


def load_plain(name: str, folder: Path, **options: Any) -> Any:
    """Load the folder's model with Hugging Face alone, which is what tests compare with."""
    return _auto(name).from_pretrained(folder, **options).eval()


@pytest.fixture(scope="session")
def plain_model(model_folder):
    """The same small model without matlens, by the name of its architecture; shared, so leave it as it is."""
    loaded: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in loaded:
            with torch.inference_mode(False):  # whatever the first test that asks for it is in
                loaded[name] = load_plain(name, model_folder(name))
        return loaded[name]

    return model


@torch.inference_mode()
def plain_vectors(
    name: str, model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Vectors of every site, ``[batch, length, d]``, and ``"logits"``, by hooks on the plain modules.

    ``tokens`` is one sentence or a batch; ``h.L`` is what the final norm is given.
    """
    layers, final_norm = (model.get_submodule(path) for path in LAYERS[name])
    with listening(layers, final_norm, SITE_MODULES.get(name, {})) as seen:
        seen["logits"] = model(torch.atleast_2d(tokens), attention_mask=mask).logits
    for site in seen:
        if site.split(".")[0] in SCALED_SITES.get(name, ()):
            seen[site] = RESIDUAL_MULTIPLIER * seen[site]
    return seen


@contextmanager
def listening(
    layers: Any,
    final_norm: Any,
    modules: Mapping[str, tuple[str, str]],
    put: Callable[[str, torch.Tensor], torch.Tensor] = lambda site, value: value,
) -> Iterator[dict[str, torch.Tensor]]:
    """What the modules of plain layers are given ("in") or give ("out") in the passes inside, by site.

    ``put`` may set another value in the place of a site's.
    """
    seen: dict[str, torch.Tensor] = {}

    def stands(site: str, value: torch.Tensor) -> torch.Tensor:
        seen[site] = value.clone()
        return put(site, value)

    def before(site: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (stands(site, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": stands(site, kwargs["hidden_states"])}

    def after(site: str, _: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)([stands(site, output[0]), *output[1:]])
        return stands(site, output)

    ends = [(f"h.{i}", module, "in") for i, module in enumerate([*layers, final_norm])]
    for i, layer in enumerate(layers):
        ends += [(f"{kind}.{i}", layer.get_submodule(path), side) for kind, (path, side) in modules.items()]
    handles = [
        module.register_forward_pre_hook(partial(before, site), with_kwargs=True)
        if side == "in"
        else module.register_forward_hook(partial(after, site))
        for site, module, side in ends
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal but for rounding: no coordinate is off by more than a small part of the largest."""
    assert ours.shape == theirs.shape
    scale = float(theirs.abs().max())
    assert scale > 0
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=0, atol=tolerance * scale)


UNPACKED = Path(matlens.__file__).parents[1] / ".browser"  # where `make test` puts a registry's Chromium
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    """A Chromium without a window, which a session starts once."""
    from playwright.sync_api import sync_playwright

    paths = [*filter(None, map(shutil.which, BROWSERS)), *filter(os.path.exists, [UNPACKED / "chromium"])]
    if not paths:
        pytest.fail("There is no Chromium for the tests of pages. Install it: sudo apt-get install chromium")
    libraries = (
        {"LD_LIBRARY_PATH": str(UNPACKED / "al2023" / "lib")} if paths[0] == UNPACKED / "chromium" else {}
    )
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=paths[0], args=list(BROWSER_OPTIONS), env={**os.environ, **libraries}
        )
        yield chromium
        chromium.close()


def tree(folder: Path) -> dict[str, bytes]:
    """What a folder holds, for tests that nothing in it changes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_sentences() -> matlens.data.Corpus:
    """Forty different sentences of 5 to 20 words that the small models know."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for i in range(40):
        length = 5 + i % 16
        texts.append(" ".join(WORDS[int(w)] for w in torch.randint(50, (length,), generator=generator)))
    return matlens.data.Corpus("words", tuple(texts), 40, 0, 0, 0)


@pytest.fixture
def sentences():
    """Forty different sentences of 5 to 20 words that the small models know."""
    return make_sentences()


def refuse_connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse every connection, and list those that are tried."""
    tried: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(repr(args))
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tried


@pytest.fixture
def no_network(monkeypatch):
    """Refuse every connection, and list those that were tried."""
    return refuse_connections(monkeypatch)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A Hugging Face cache of the test's own."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub in memory that the hub's client asks."""
    stand_in = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", stand_in.client)
    return stand_in


def pytest_configure(config: pytest.Config) -> None:
    """Let small tests fit on few samples; not in pyproject.toml, which is read before jaxtyping's hook."""
    config.addinivalue_line("filterwarnings", "ignore::matlens.InputWarning")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sizes of the comparison on the real model; `make verify` asks for the full one."""
    parser.addoption("--real-train", type=int, default=40, help="train sentences of tests/study/test_real.py")
    parser.addoption(
        "--real-val", type=int, default=12, help="validation sentences of tests/study/test_real.py"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files that take longest first, so that no process is left alone with one of them.

    Those are the comparisons on the real model, and after them the files of many tests.
    """
    n_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("real") is None, -n_tests[item.path]))


def _sentences(n: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, int(generator.integers(5, 12)))) for _ in range(n)]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """A folder with ``words.txt`` and ``others.txt`` of equal size, and ``few.txt`` of half of it."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, (name, n) in enumerate((("words", 120), ("others", 120), ("few", 60))):
        (folder / f"{name}.txt").write_text("\n".join(_sentences(n, seed)))
    return folder
