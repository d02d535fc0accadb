"""Flags of sampling, of the KV cache and of a draft model, named as in mlx_lm.generate; and mlx-lm's keywords."""

import argparse
from dataclasses import dataclass
from typing import Any

from ..errors import GearbxError
from .settings import Settings, name, number, one_of


@dataclass(frozen=True)
class SamplingSettings(Settings):
    seed: int | None = number(None, 0, 2**63)
    temp: float = number(0.0, 0)
    top_p: float = number(1.0, 0, 1)
    min_p: float = number(0.0, 0, 1)
    top_k: int = number(0, 0)
    xtc_probability: float = number(0.0, 0, 1)
    xtc_threshold: float = number(0.1, 0, 0.5)
    min_tokens_to_keep: int = number(1, 1)


@dataclass(frozen=True)
class CacheSettings(Settings):
    max_kv_size: int | None = number(None, 1)
    prefill_step_size: int = number(2048, 1)
    kv_bits: int | None = one_of(None, 2, 3, 4, 5, 6, 8)
    kv_group_size: int = one_of(64, 32, 64, 128)
    quantized_kv_start: int = number(5000, 0)
    draft_model: str | None = name()
    num_draft_tokens: int = number(3, 1)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--seed", type=int, help="PRNG seed")
    sampling.add_argument("--temp", type=float, help="Sampling temperature. Default: 0, greedy")
    sampling.add_argument("--top-p", type=float, help="Sampling top-p")
    sampling.add_argument("--min-p", type=float, help="Sampling min-p")
    sampling.add_argument("--top-k", type=int, help="Sampling top-k")
    sampling.add_argument("--xtc-probability", type=float, help="Probability of XTC sampling")
    sampling.add_argument("--xtc-threshold", type=float, help="Threshold for XTC sampling")
    sampling.add_argument("--min-tokens-to-keep", type=int, help="Tokens to keep for min-p sampling.")


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    cache = parser.add_argument_group("KV cache and drafts")
    cache.add_argument("--max-kv-size", type=int, help="Set the maximum key-value cache size")
    cache.add_argument("--prefill-step-size", type=int, help="Prompt tokens processed at a time. Default: 2048")
    cache.add_argument("--kv-bits", type=int, help="Bits for KV cache quantization. Default: none.")
    cache.add_argument("--kv-group-size", type=int, help="Group size for KV cache quantization. Default: 64")
    cache.add_argument("--quantized-kv-start", type=int, help="Step to begin KV cache quantization. Default: 5000")
    cache.add_argument("--draft-model", help="A model to be used for speculative decoding.")
    cache.add_argument("--num-draft-tokens", type=int, help="Tokens to draft. Default: 3")


def check_sampling(settings: SamplingSettings, vocab_size: int) -> None:
    """Raises GearbxError for numbers that exceed the vocabulary."""
    for flag, value, limit in (
        ("--top-k", settings.top_k, vocab_size - 1),
        ("--min-tokens-to-keep", settings.min_tokens_to_keep, vocab_size),
    ):
        if value > limit:
            raise GearbxError(f"{flag} is {value}, and the vocabulary {vocab_size}; give fewer")


def cache_keywords(settings: CacheSettings) -> dict[str, Any]:
    """The part of mlx-lm's `stream_generate` keywords that flags of the KV cache give."""
    return {
        "max_kv_size": settings.max_kv_size,
        "prefill_step_size": settings.prefill_step_size,
        "kv_bits": settings.kv_bits,
        "kv_group_size": settings.kv_group_size,
        "quantized_kv_start": settings.quantized_kv_start,
        "num_draft_tokens": settings.num_draft_tokens,
    }
