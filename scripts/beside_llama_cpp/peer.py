"""llama.cpp's side, through llama-cpp-python: reading tokens, greedy decoding, and a draft model with a KV cache."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 512  # llama.cpp's default; prompts are as long


def open_model(
    file: Path, context: int, threads: int, draft_model: Callable[..., Any] | None = None, exact: bool = False
) -> Any:
    """A GGUF file in memory, as a `llama_cpp.Llama`.

    Args:
        context: tokens that its KV cache has room for.
        draft_model: proposes tokens that follow those it is given.
        exact: attention in float32, as ours, with keys and values in it. Otherwise flash attention, the faster one,
            with both in float16.
    """
    import llama_cpp

    cache = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
    return llama_cpp.Llama(
        str(file),
        n_ctx=context,
        n_batch=BATCH,
        n_threads=threads,
        n_threads_batch=threads,
        use_mmap=False,  # so that q4_0 is put into the order of its fastest product
        flash_attn=not exact,
        type_k=cache,
        type_v=cache,
        draft_model=draft_model,
        verbose=False,
    )


def favourite(model: Any) -> int:
    """The token with the largest of the last logits."""
    import llama_cpp

    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())


def read_again(model: Any, tokens: Sequence[int], keep: int = 0) -> None:
    """Compute the tokens that follow the first `keep` ones of the KV cache, and forget what else followed them."""
    model.n_tokens = keep
    model.eval(tokens)


def follow(model: Any) -> Iterator[int]:
    """The greedy continuation of what the model has read, computed as it is asked for."""
    while True:
        token = favourite(model)
        yield token
        model.eval([token])


class Drafter:
    """A draft model for `llama_cpp.Llama`: the greedy continuation by another one.

    What the texts of two calls begin with is computed once: the KV cache keeps it.
    """

    def __init__(self, model: Any, length: int, continuation: Callable[[Any], Iterator[int]] = follow) -> None:
        self.model, self.length, self.continuation = model, length, continuation
        self.read: list[int] = []  # tokens whose keys and values are in the cache

    def __call__(self, text: np.ndarray, /, **_: Any) -> np.ndarray:
        """Tokens to verify after the text, `length` of them."""
        tokens = text.tolist()
        # The last token is computed in any case: the logits after it are what the draft begins with.
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.read, tokens[:-1])))
        read_again(self.model, tokens[common:], common)
        drafted = list(islice(self.continuation(self.model), self.length))
        self.read = tokens + drafted[:-1]
        return np.array(drafted, dtype=np.intc)


def generated(model: Any, prompt: Sequence[int], stop: set[int], most: int) -> Iterator[int]:
    """The greedy text after a prompt, with the model's draft model if it has one, up to a token of `stop`.

    Args:
        most: the number of tokens, if no such token comes.
    """
    model.reset()
    for token in islice(model.generate(list(prompt), temp=0.0, repeat_penalty=1.0), most):
        yield token
        if token in stop:
            return
