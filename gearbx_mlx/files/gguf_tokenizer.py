"""The tokenizer in the metadata of a GGUF, as the files that transformers reads.

Two kinds are known: byte-level BPE ("gpt2"), whose texts are cut by an expression first, and SentencePiece ("llama"),
whose pieces have scores.

Source: llama.cpp's llama-vocab.cpp (how texts are cut, what begins them), and how transformers reads SentencePiece.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BPE, PIECES = "gpt2", "llama"
UNKNOWN, SPECIAL, OF_USER = 2, 3, 4  # types of tokens: the last are tokens that no text is cut in
SPACE = "▁"  # of SentencePiece

# How texts are cut before byte-level BPE, by tokenizer.ggml.pre: digits one by one, or this expression.
CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
)
CUTS = {
    **dict.fromkeys(("smollm", "starcoder", "refact"), None),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WORDS % ""),
    **dict.fromkeys(("llama-bpe", "dbrx", "smaug-bpe"), WORDS % "{1,3}"),
    **{"gpt-4o": BY_CASE % (CONTRACTED + "?", CONTRACTED + "?", "{1,3}"), "tekken": BY_CASE % ("", "", "")},
}
WHOLE = ("llama-bpe", "tekken")  # which look a word up before they cut it, and begin a text with the token for that
ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def write_tokenizer(of: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json, and its settings with the chat template.

    Args:
        of: the metadata of a GGUF.

    Raises:
        KeyError, ValueError, IndexError, TypeError: metadata that do not fit each other.
    """
    pieces = of["tokenizer.ggml.model"] == PIECES
    tokenizer = of_pieces(of) if pieces else of_bytes(of)
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    for chosen, special in (((SPECIAL, *([UNKNOWN] if pieces else [])), True), ((OF_USER,), False)):
        whole = [token for token, own in zip(tokens, kinds, strict=True) if own in chosen]
        added = [AddedToken(token, special=special, normalized=pieces and not special) for token in whole]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: of.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    begins = of.get("tokenizer.ggml.add_bos_token", pieces or of.get("tokenizer.ggml.pre") in WHOLE)
    if begins and ids["bos"] is not None:
        bos = tokens[ids["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[place] for name, place in ids.items() if place is not None},
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in of:
        settings["chat_template"] = of["tokenizer.chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def ends_of(of: Mapping[str, Any]) -> list[int]:
    """The tokens at which a text ends: that of the file, and that which ends a turn of a chat."""
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    turns = [place for place, token in enumerate(tokens) if token in ENDS_OF_TURN and kinds[place] == SPECIAL]
    named = [of["tokenizer.ggml.eos_token_id"], of.get("tokenizer.ggml.eot_token_id")]
    return [*dict.fromkeys(place for place in (*named, *turns) if place is not None)]


def of_bytes(of: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE."""
    tokens, pre = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ")) for merge in of["tokenizer.ggml.merges"]]
    places = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=places, merges=merges, ignore_merges=pre in WHOLE))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutting(pre))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cutting(pre: str) -> list[Any]:
    """How a text is cut before its parts are merged."""
    expression = CUTS[pre]
    if expression is None:
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def of_pieces(of: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: of neighbours that a piece consists of, those with the highest score are merged first."""
    tokens, spaced = of["tokenizer.ggml.tokens"], of.get("tokenizer.ggml.add_space_prefix", True)
    places = {token: place for place, token in enumerate(tokens)}
    unknown = tokens[of.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = merges_of(places, of["tokenizer.ggml.scores"], of["tokenizer.ggml.token_type"])
    model = models.BPE(vocab=places, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if spaced else spaces
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if spaced else back)
    return tokenizer


def merges_of(places: Mapping[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """The pairs that make a piece, best first."""
    found = []
    for piece, place in places.items():
        if kinds[place] in (UNKNOWN, SPECIAL):
            continue
        for end in range(1, len(piece)):
            left, right = places.get(piece[:end]), places.get(piece[end:])
            if left is not None and right is not None:
                found.append((-scores[place], left, right, piece[:end], piece[end:]))
    return [(left, right) for *_, left, right in sorted(found)]
