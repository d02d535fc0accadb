"""What `calibrate --mode lossless` finds, as a file: the draft gear, its curve a(H), and the bound."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from ..errors import GearbxError
from .acceptance import AcceptanceCurve, ProductRule

SCHEMA, VERSION = "gearbx-mlx drafting", 1


@dataclass
class DraftFile:
    """How a model drafts for its top gear.

    gears: bits of the ladder that was calibrated, the last of which checks; draft: bits of the gear that drafts.
    fingerprint: of the model's weights. edges (bits), agreement: of the AcceptanceCurve. bound: on its product.
    tokens: that it was found on, and the share of them on which both gears agree. weight_bytes_per_token: predicted
    from them, and of the top gear alone.
    best_fixed_length, fixed_weight_bytes_per_token: what a fixed length comes to at its best, for comparison.
    """

    gears: list[int]
    draft: int
    bound: float
    edges: list[float]
    agreement: list[float]
    vocab_size: int
    fingerprint: str
    model: str
    group_size: int
    format: str
    tokens: int
    agreement_overall: float
    weight_bytes_per_token: float
    weight_bytes_per_token_top: float
    best_fixed_length: int
    fixed_weight_bytes_per_token: float
    schema: str = SCHEMA
    version: int = VERSION

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def rule(self) -> ProductRule:
        return ProductRule(AcceptanceCurve(tuple(self.edges), tuple(self.agreement)), self.bound)

    def check(self, gears: Sequence[int], vocab_size: int, fingerprint: str) -> None:
        """Raises GearbxError unless it was made for this ladder, vocabulary and model."""
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
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise GearbxError(f"not JSON ({error})") from error
    if not isinstance(content, dict) or (content.get("schema"), content.get("version")) != (SCHEMA, VERSION):
        raise GearbxError(f"not a drafting file of schema '{SCHEMA}', version {VERSION}")
    for field in fields(DraftFile):
        value = content.get(field.name)
        if field.type in (int, float, str):
            kind: type | tuple[type, ...] = (int, float) if field.type is float else field.type
            right = isinstance(value, kind) and not isinstance(value, bool)
        else:
            right = isinstance(value, list) and all(
                isinstance(item, int | float) and not isinstance(item, bool) for item in value
            )
        if not right:
            raise GearbxError(f"'{field.name}' is missing or of the wrong kind")
    known = {field.name for field in fields(DraftFile)}
    made = DraftFile(**{name: value for name, value in content.items() if name in known})
    made.rule()
    if made.draft not in made.gears[:-1]:
        raise GearbxError(f"'draft' is {made.draft}, which is no gear below the top of {made.gears}")
    return made
