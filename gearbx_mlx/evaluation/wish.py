"""The wish that `calibrate --target-...` fulfils: at least this agreement, at most this KL, or at most these bytes."""

from dataclasses import dataclass

from ..errors import GearbxError


@dataclass(frozen=True)
class PolicyOutcome:
    """The quality and the cost of a policy: agreement with the top gear, mean KL (nats), weight bytes per token."""

    agreement: float
    kl_mean: float
    weight_bytes: float


@dataclass(frozen=True)
class Wish:
    """One of three: the least agreement with the top gear, the most mean KL (nats), the most weight bytes per token.

    Raises:
        GearbxError: not exactly one of them, or a value that it cannot have.
    """

    agreement: float | None = None
    kl: float | None = None
    weight_bytes: float | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise GearbxError("give one of a target agreement, a target KL, or target bytes")
        if self.agreement is not None and not 0 < self.agreement <= 1:
            raise GearbxError(f"target agreement is {self.agreement}; give a part of 1, such as 0.99")
        if self.kl is not None and not self.kl >= 0:
            raise GearbxError(f"target KL is {self.kl}; give nats, 0 or more")
        if self.weight_bytes is not None and not self.weight_bytes > 0:
            raise GearbxError(f"target bytes are {self.weight_bytes}; give weight bytes per token")

    def __str__(self) -> str:
        if self.agreement is not None:
            return f"agreement of {self.agreement:g} with the top gear"
        return (
            f"mean KL of {self.kl:g} nats" if self.kl is not None else f"{self.weight_bytes:g} weight bytes per token"
        )

    def met_by(self, outcome: PolicyOutcome) -> bool:
        if self.agreement is not None:
            return outcome.agreement >= self.agreement
        if self.kl is not None:
            return outcome.kl_mean <= self.kl
        return outcome.weight_bytes <= (self.weight_bytes or 0)

    def rank(self, outcome: PolicyOutcome) -> tuple[float, float]:
        """Sort key, the best outcome first: by bytes, then KL; where bytes are the wish, by KL, then bytes."""
        both = outcome.weight_bytes, outcome.kl_mean
        return both if self.weight_bytes is None else both[::-1]
