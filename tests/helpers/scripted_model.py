"""A model that writes the text of a test, with the tokenizer of the demo model and a few tokens more."""

import itertools
import json
import shutil
from pathlib import Path

import mlx.core as mx
from conftest import save_model, tiny_model, weights_of
from mlx.utils import tree_unflatten

from gearbx_mlx import load
from gearbx_mlx.loading import DEMO_MODEL

WIDTH = 64


def save_scripted(path: Path, texts: list[str], template: str) -> None:
    """Write a model with a token for each text, which it writes one after the other when a prompt ends with ":".

    template: a chat template; the demo model's ends with ":".
    """
    tokenizer = load()[1]
    vocabulary, colon, end = len(tokenizer.vocab), tokenizer.encode(":")[-1], tokenizer.eos_token_id
    chain = [colon, *range(vocabulary, vocabulary + len(texts)), end]
    save_chain(path, chain, vocabulary + len(texts))
    add_tokens(path, texts, vocabulary)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def save_endless(path: Path) -> None:
    """Write the demo model with room for a long text, which a word ends that it hardly ever writes: the last one."""
    shutil.copytree(DEMO_MODEL, path)
    (path / "generation_config.json").unlink()
    words = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    never, last = max(words.items(), key=lambda pair: pair[1])
    of_model = {"eos_token_id": last, "max_position_embeddings": 10**6}
    for name, change in (("config.json", of_model), ("tokenizer_config.json", {"eos_token": never})):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | change))


def add_tokens(path: Path, texts: list[str], first: int) -> None:
    """Give the tokenizer a token for each text, numbered from `first` on."""
    content = json.loads((path / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [{"id": first + number, "content": text, **plain} for number, text in enumerate(texts)]
    (path / "tokenizer.json").write_text(json.dumps(content))


def save_chain(path: Path, chain: list[int], vocabulary: int) -> None:
    """Write a model that writes these tokens, each after the one before, and the demo model's tokenizer."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": WIDTH, "num_attention_heads": 1, "head_dim": WIDTH}
    model = tiny_model(**sizes, max_position_embeddings=512, vocab_size=vocabulary)
    weights = {name: mx.zeros_like(array) for name, array in weights_of(model).items()}
    weights["model.norm.weight"] = mx.ones(WIDTH)
    for place, (token, following) in enumerate(itertools.pairwise(chain)):
        weights["model.embed_tokens.weight"][token, place] = 1.0
        weights["lm_head.weight"][following, place] = 1.0
    model.update(tree_unflatten(list(weights.items())))
    save_model(model, path)


def save_spelling(path: Path, pieces: list[str], decoder: dict, end: str = "</s>") -> None:
    """Write a model that writes the pieces, in this order, after a prompt of token 0. Its vocabulary has nothing else.

    decoder: from tokenizer.json; it determines the kind of tokenizer.
    """
    vocabulary = {piece: number for number, piece in enumerate(["<s>", *pieces, end])}
    save_chain(path, list(vocabulary.values()), len(vocabulary))
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"] |= {"vocab": vocabulary, "merges": [], "unk_token": None}
    mark = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": vocabulary[name], "content": name, **mark} for name in ("<s>", end)]
    content |= {"decoder": decoder, "pre_tokenizer": None, "post_processor": None}
    (path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>", "eos_token": end, "chat_template": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
