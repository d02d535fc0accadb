"""Sampling, the KV cache and a draft model, named as in mlx_lm.generate; and mlx-lm's keywords."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import GearbxError
from ..gears.ladder import check_kv_gears
from .settings import Settings, flag

COLDEST = 0.001  # divided by less, logits of half precision overflow


@dataclass(frozen=True)
class SamplingSettings(Settings):
    title: ClassVar[str] = "sampling"

    seed: int | None = flag(None, "PRNG seed", least=0, most=2**63)
    temp: float = flag(0.0, "Sampling temperature; 0: greedy.", least=0, most=1000)
    top_p: float = flag(1.0, "Sampling top-p.", least=0, most=1)
    min_p: float = flag(0.0, "Sampling min-p.", least=0, most=1, rare=True)
    top_k: int = flag(0, "Sampling top-k.", least=0)
    xtc_probability: float = flag(0.0, "Probability of XTC sampling.", least=0, most=1, rare=True)
    xtc_threshold: float = flag(0.1, "Threshold for XTC sampling.", least=0, most=0.5, rare=True)
    min_tokens_to_keep: int = flag(1, "Tokens to keep for min-p sampling.", least=1, rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temp < COLDEST:
            raise GearbxError(f"--temp is {self.temp}; give 0 for greedy, or {COLDEST} to 1000")


@dataclass(frozen=True)
class CacheSettings(Settings):
    title: ClassVar[str] = "KV cache and drafts"

    max_kv_size: int | None = flag(None, "Set the maximum key-value cache size", least=1)
    prefill_step_size: int = flag(2048, "Prompt tokens processed at a time.", least=1, rare=True)
    kv_bits: int | None = flag(
        None, "Bits for KV cache quantization. Default: none", choices=(2, 3, 4, 5, 6, 8), rare=True
    )
    kv_group_size: int = flag(64, "Group size for KV cache quantization.", choices=(32, 64, 128), rare=True)
    quantized_kv_start: int = flag(5000, "Step to begin KV cache quantization.", least=0, rare=True)
    kv_gears: str | None = flag(
        None,
        "Gears of the KV cache, ascending bits of 4, 8 and 16, such as 4,16. Default: none",
        metavar="BITS,BITS",
        rare=True,
    )
    kv_gear: int | None = flag(
        None,
        "The gear of the KV cache that is read. Default: it follows that of the weights",
        choices=(4, 8, 16),
        rare=True,
    )
    draft_model: str | None = flag(None, "A model to be used for speculative decoding.", named=True)
    num_draft_tokens: int = flag(3, "Tokens to draft.", least=1, rare=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kv_gears(self.kv_gears, self.kv_gear, self.kv_bits, self.draft_model)


def check_sampling(settings: SamplingSettings, vocab_size: int) -> None:
    """Raises GearbxError for numbers that exceed the vocabulary."""
    for name, value, limit in (
        ("--top-k", settings.top_k, vocab_size - 1),
        ("--min-tokens-to-keep", settings.min_tokens_to_keep, vocab_size),
    ):
        if value > limit:
            raise GearbxError(f"{name} is {value}, and the vocabulary {vocab_size}; give fewer")


def cache_keywords(settings: CacheSettings) -> dict[str, Any]:
    """The part of mlx-lm's `stream_generate` keywords that flags of the KV cache give."""
    return {
        "max_kv_size": settings.max_kv_size,
        "prefill_step_size": settings.prefill_step_size,
        "kv_bits": settings.kv_bits,
        "kv_group_size": settings.kv_group_size,
        "quantized_kv_start": settings.quantized_kv_start,
        "kv_gears": settings.kv_gears,
        "kv_gear": settings.kv_gear,
        "num_draft_tokens": settings.num_draft_tokens,
    }
