"""The file that `calibrate --mode lossless` writes: the draft gear, its curve a(H), and the bound."""

import json
import math
from collections.abc import Sequence

from msgspec import Struct, to_builtins

from ..errors import GearbxError
from ..files.reading import Count, check_schema, parse_json, typed
from .acceptance import AcceptanceCurve, ProductRule
from .pass_costs import MOST_ROWS

SCHEMA, VERSION = "gearbx-mlx drafting", 1


class DraftTimes(Struct, frozen=True):
    """What passes take on one machine, in seconds.

    machine: processor, cores, kernels, and how weights and activations are stored. context: tokens in the KV cache.
    alone: a token of the top gear in mlx-lm's own loop. draft: a drafted token. verification: passes of the top gear
    over 1, 2, ... 16 tokens. per_token: predicted from the calibration's tokens.
    """

    machine: str
    context: Count
    alone: float
    draft: float
    verification: list[float]
    per_token: float

    def __post_init__(self) -> None:
        if len(self.verification) != MOST_ROWS:
            raise GearbxError(f"times has {len(self.verification)} verifications; {MOST_ROWS} are needed")
        if not all(0 < seconds < math.inf for seconds in (self.alone, self.draft, self.per_token, *self.verification)):
            raise GearbxError("times has seconds that are not above 0")

    @property
    def times_faster(self) -> float:
        """Than the top gear alone, as predicted."""
        return self.alone / self.per_token


class DraftFile(Struct, frozen=True):
    """How a model drafts for its top gear: the content of a drafting file.

    gears: bits of the ladder that was calibrated, the last of which verifies; draft: bits of the gear that drafts.
    fingerprint: of the model's weights. edges (bits), agreement: of the AcceptanceCurve. bound: on its product.
    tokens: of the calibration; agreement_overall: the share on which both gears agree. weight_bytes_per_token:
    predicted from these tokens; weight_bytes_per_token_top: of the top gear alone; weight_bytes_per_token_original: of
    the original weights, where the top gear reads other bytes than these.
    best_fixed_length, fixed_weight_bytes_per_token: the best fixed length of drafts, and what it reads, to compare.
    times: what passes take, where that was measured.
    """

    gears: list[Count]
    draft: Count
    bound: float
    edges: list[float]
    agreement: list[float]
    vocab_size: Count
    fingerprint: str
    model: str
    group_size: Count
    format: str
    tokens: Count
    agreement_overall: float
    weight_bytes_per_token: float
    weight_bytes_per_token_top: float
    best_fixed_length: Count
    fixed_weight_bytes_per_token: float
    weight_bytes_per_token_original: float | None = None
    times: DraftTimes | None = None
    schema: str = SCHEMA
    version: int = VERSION

    def __post_init__(self) -> None:
        self.rule()
        if self.draft not in self.gears[:-1]:
            raise GearbxError(f"draft is {self.draft}, which is not a gear below the top of {self.gears}")

    @property
    def weight_bytes_per_token_of_original(self) -> float:
        """Those of the top gear, unless it reads other bytes than the original weights have."""
        return self.weight_bytes_per_token_original or self.weight_bytes_per_token_top

    def text(self) -> str:
        return json.dumps(to_builtins(self), indent=2) + "\n"

    def rule(self) -> ProductRule:
        return ProductRule(AcceptanceCurve(tuple(self.edges), tuple(self.agreement)), self.bound)

    def check(self, gears: Sequence[int], vocab_size: int, fingerprint: str) -> None:
        """Raises GearbxError unless the file was made for this ladder, vocabulary and model."""
        if self.vocab_size != vocab_size:
            raise GearbxError(f"made for a vocabulary of {self.vocab_size}, this model has {vocab_size}")
        if self.fingerprint != fingerprint:
            raise GearbxError(f"made for another model ({self.model}), whose weights are not these")
        if list(self.gears) != list(gears):
            shown, mine = (",".join(map(str, bits)) for bits in (gears, self.gears))
            raise GearbxError(f"made for gears {mine}, not {shown}")


def parse_draft_file(text: str) -> DraftFile:
    """A drafting file from its text.

    Raises:
        GearbxError: not JSON, another schema or version, a field that is missing or of the wrong kind.
    """
    content = parse_json(text)
    check_schema(content, "a drafting file", SCHEMA, VERSION)
    return typed(content, DraftFile)
