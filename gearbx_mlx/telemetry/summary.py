"""A run in numbers: counted token by token, told once at the end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .trace import Token


@dataclass
class Tally:
    """What adds up over the tokens of a run. `gear_tokens` names every gear of the ladder, also with 0."""

    gear_tokens: dict[str, int]
    tokens: int = 0
    shifts: int = 0
    entropy_sum: float = 0.0

    @classmethod
    def of(cls, gears: Sequence[str]) -> "Tally":
        return cls(dict.fromkeys(gears, 0))

    def add(self, response: Token) -> None:
        self.tokens += 1
        self.gear_tokens[response.gear] += 1
        self.shifts += response.shifted
        self.entropy_sum += response.entropy

    def mean(self, per_gear: Mapping[str, float]) -> float:
        """The mean over tokens of something that each gear has; 0 without tokens."""
        total = sum(count * per_gear[name] for name, count in self.gear_tokens.items())
        return total / self.tokens if self.tokens else 0.0

    @property
    def mean_entropy(self) -> float:
        return self.entropy_sum / self.tokens if self.tokens else 0.0


def summarize(
    tally: Tally,
    *,
    model: str,
    mode: str,
    ladder: Sequence[Mapping[str, Any]],
    bits_per_weight: Mapping[str, float],
    weight_bytes: Mapping[str, int],
    **further: Any,
) -> dict[str, Any]:
    """The summary object.

    Args:
        ladder: name, bits, bytes_per_weight of each gear.
        bits_per_weight: of the managed layers, by gear, as read.
        weight_bytes: that one token reads from the whole model, by gear.
        further: fields that the command knows: speed, memory, layers.
    """
    return {
        "model": model,
        "mode": mode,
        "ladder": list(ladder),
        "tokens": tally.tokens,
        "gear_tokens": tally.gear_tokens,
        "shifts": tally.shifts,
        "mean_entropy_bits": tally.mean_entropy,
        "effective_bits_per_weight": tally.mean(bits_per_weight),
        "weight_bytes_per_token": tally.mean(weight_bytes),
        "weight_bytes_per_token_top": weight_bytes[ladder[-1]["name"]],
        **further,
    }


def as_json(summary: Mapping[str, Any]) -> str:
    return json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
