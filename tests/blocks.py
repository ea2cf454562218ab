"""Code blocks of README and of the documentation, and the small world that they run in."""

from __future__ import annotations

import functools
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
import pytest
import torch
import transformers
import typer
from conftest import SPECIAL
from sybil import Document, Example, Lexeme, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import matlens
from matlens.cli.app import app
from matlens.models import loading, places

PROJECT = Path(matlens.__file__).parents[1]
PAGES = sorted([PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")])
NOTEBOOKS = sorted((PROJECT / "docs" / "notebooks").glob("*.py"))
LANGUAGES = {"python", "sh", "text", "bibtex"}
SKETCH = "sketch"

# Sizes of the documentation are divided by this, and its layers, 30 of them, by three.
SMALLER, LEAST = 20, 40
N_SENTENCES, N_LAYERS, D_MLP = 600, 10, 64


def small(number: str) -> str:
    """A size or a layer of the documentation as it is here."""
    size = int(number.replace("_", ""))
    if 10 <= size <= 30:
        return str(size // 3)
    return number if size < 100 else str(max(LEAST, size // SMALLER))


def shrink(code: str) -> str:
    """Python of the documentation with the sizes, and the value vectors, that there are here."""
    code = re.sub(r"\bL(\d+)D(\d+)\b", lambda name: f"L{small(name[1])}D{int(name[2]) % D_MLP}", code)
    code = re.sub(r"\bh\.(\d+)\b", lambda site: f"h.{small(site[1])}", code)
    return re.sub(r"(?<![\w.\"'-])\d[\d_]*(?![\w.\"'-])", lambda number: small(number[0]), code)


# Options that make a command small where it does not give them itself.
SMALL_OPTIONS = {
    "run": ("--train", "100", "--val", "20", "--pairs", "last"),
    "collect": ("--train", "100", "--val", "20"),
    "part": ("--train", "100", "--val", "20", "--pairs", "last"),
    "fit": ("--pairs", "last"),
    "merge": ("--pairs", "last"),
    "lens fit": ("--train", "60"),
    "lens report": ("--train", "60", "--val", "10"),
    "linearity": ("--every", "5", "--windows", "12", "--window", "16"),
    "values cluster": ("--clusters", "50"),
}


def shrink_arguments(arguments: list[str]) -> list[str]:
    """Arguments of a command, with sizes for the small models where they are given and where they are not."""
    shrunk = [shrink(argument) for argument in arguments]
    for command, options in SMALL_OPTIONS.items():
        if " ".join(shrunk).startswith(f"{command} "):
            for name, value in zip(options[::2], options[1::2], strict=True):
                shrunk += [] if name in shrunk else [name, value]
    return shrunk


def texts() -> str:
    """Everything that the documentation's code could ask the tokenizer for."""
    return "\n".join(path.read_text() for path in [*PAGES, *NOTEBOOKS])


@functools.cache
def vocabulary() -> dict[str, int]:
    """Words of the documentation with the space before them, as a byte-level tokenizer has them."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word for word, _ in splitter.pre_tokenize_str(texts().replace("␣", " "))}
    words |= set(pre_tokenizers.ByteLevel.alphabet())
    return {word: i for i, word in enumerate([*SPECIAL.values(), *sorted(words)])}


CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"


def save_tokenizer(folder: Path, **special: str) -> None:
    """Write a tokenizer that knows the words of the documentation."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary() | {"[MASK]": len(vocabulary())}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, chat_template=CHAT, **SPECIAL, **special
    ).save_pretrained(folder)


def save_small_models(folder: Path) -> None:
    """Write small models under the names that the documentation uses."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": len(vocabulary()) + 1, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    llama = transformers.LlamaConfig(
        **common, hidden_size=32, num_hidden_layers=N_LAYERS, num_attention_heads=4, intermediate_size=D_MLP,
        max_position_embeddings=64, initializer_range=0.3,  # large, so that FFNs change what is predicted
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(
        **common, n_embd=32, n_layer=N_LAYERS, n_head=4, n_inner=D_MLP, n_positions=64
    )
    for name, config in {places.SMOLLM2: llama, "gpt2": gpt2}.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        save_tokenizer(folder / name)


def small_sentences(*_: Any) -> Iterator[str]:
    """Sentences of the documentation's words, in place of every corpus that it names."""
    words = [word.removeprefix("Ġ") for word in vocabulary() if re.fullmatch("Ġ[a-z]+", word)]
    generator = torch.Generator().manual_seed(0)
    for i in range(N_SENTENCES):
        chosen = torch.randint(len(words), (6 + i % 9,), generator=generator)
        yield " ".join(words[int(word)] for word in chosen)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory):
    """A folder with small models under the names of real ones."""
    folder = tmp_path_factory.mktemp("documentation")
    save_small_models(folder)
    return folder


@pytest.fixture(scope="session")
def small_load(small_models):
    """`matlens.load`, giving the small models; each is loaded once."""
    whole = loading.load

    @functools.cache
    def load(name: str, **options: Any) -> Any:
        return whole(str(small_models / name), **options)

    return load


@pytest.fixture
def small_world(tmp_path, monkeypatch, small_load, small_models):
    """An empty folder to work in, where models and corpora of the documentation's names are small ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analyses").symlink_to(PROJECT / "analyses")
    (tmp_path / "sentences.txt").write_text("\n".join(small_sentences()))
    for home in (matlens, matlens.models, loading):  # a face keeps what it has given once, so faces go first
        monkeypatch.setattr(home, "load", small_load)
    monkeypatch.setenv("MATLENS_CACHE", "off")  # it goes by the files of the real models
    monkeypatch.setattr("matlens.ffn.catalogue.load", small_load)
    (tmp_path / "gpt2").symlink_to(small_models / "gpt2")  # the name is looked up before it is loaded
    monkeypatch.setattr("matlens.data.corpus.open_source", lambda *_: nullcontext(small_sentences()))
    monkeypatch.setattr("matlens.pruning.evaluation._WRITTEN", 4)
    yield tmp_path
    torch.set_num_threads(threads)


class Runner:
    """Runs the blocks of one page after the other, at small size."""

    def run(self, path: Path) -> None:
        """Run a page; a block that fails says where it stands."""
        for example in Document.parse(str(path), self._blocks).examples():
            example.evaluate()

    def _blocks(self, document: Document) -> Iterator[Region]:
        lexer = FencedCodeBlockLexer(r"[^\n`]*")
        for region in lexer(document):
            language, *role = region.lexemes["language"].split() or [""]
            assert language in LANGUAGES, f"{document.path}: a block of {language or 'no language'}"
            assert role in ([], [SKETCH]), f"{document.path}: a block of {language} {' '.join(role)}"
            source = region.lexemes["source"]
            region.parsed = Lexeme(shrink(source), source.offset, source.line_offset)
            region.evaluator = self._sketch if role else getattr(self, f"_{language}")
            yield region

    def _sketch(self, example: Example) -> None:
        compile(example.parsed, example.path, "exec")

    def _text(self, _: Example) -> None:
        """Output, of which `test_real` compares some."""

    _bibtex = _text

    def _python(self, example: Example) -> None:
        PythonEvaluator()(example)

    def _sh(self, example: Example) -> None:
        for command in commands(example.region.lexemes["source"]):
            run_command(command)


class Block(NamedTuple):
    """A block of a page."""

    language: str
    source: str


def blocks_of(path: Path) -> list[Block]:
    """Blocks of a page, in their order, as they stand there."""
    lexer = FencedCodeBlockLexer(r"[^\n`]*")
    document = Document(path.read_text(), str(path))
    return [
        Block(str(region.lexemes["language"]), str(region.lexemes["source"])) for region in lexer(document)
    ]


def commands(source: str) -> Iterator[list[str]]:
    """Commands of a shell block, each as its words."""
    for line in source.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def run_command(words: list[str]) -> None:
    """Run a command of ours at small size; check any other against what it is for."""
    program, *arguments = words
    if program == "matlens":
        done = CliRunner().invoke(app, shrink_arguments(arguments), catch_exceptions=False)
        assert done.exit_code == 0, f"{shlex.join(words)}: {done.output}"
    elif program == "torchrun":  # in one process, which gives what several give
        run_command(arguments[arguments.index("-m") + 1 :])
    elif program == "python":
        check_script(arguments)
    elif program == "make":
        check_make(arguments)
    else:
        assert words[:2] == ["pip", "install"], f"an unknown command: {shlex.join(words)}"
        check_pip(arguments[1:])


def check_script(arguments: list[str]) -> None:
    """Give an analysis its arguments, and let it do nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.core.TyperCommand, "invoke", lambda *_: None)
        patch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(PROJECT / arguments[0]), run_name="__main__")
    assert stop.value.code in (0, None), shlex.join(arguments)


def check_make(arguments: list[str]) -> None:
    """Let make say what it would do, and look whether it knows the variables that are given."""
    known = set(re.findall(r"^(\w+) \?=", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))
    given = {argument.partition("=")[0] for argument in arguments if "=" in argument}
    assert given <= known, f"the Makefile does not know {given - known}"
    subprocess.run(["make", "-n", *arguments], cwd=PROJECT, check=True, capture_output=True)


def check_pip(arguments: list[str]) -> None:
    """Look whether extras exist, and whether what is pinned is pinned as the Makefile has it."""
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for argument in arguments:
        if ours := re.fullmatch(r"(?:\.|matlens)(?:\[([\w,]+)\])?", argument):
            assert set(re.findall(r"\w+", ours[1] or "")) <= set(extras), argument
        elif not argument.startswith("-"):
            assert argument in (PROJECT / "Makefile").read_text(), argument


def run_notebook(path: Path) -> int:
    """Run the cells of a notebook one after the other; gives how many there are."""
    namespace: dict[str, Any] = {}
    cells = [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    cells = [source for source in cells if not source.startswith("%pip")]
    for i, source in enumerate(cells, start=1):
        exec(compile(shrink(source), f"{path}, cell {i}", "exec"), namespace)
    return len(cells)
