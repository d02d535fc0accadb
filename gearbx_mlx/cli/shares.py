"""--shares: the part of the tokens that each gear is to have."""

from ..errors import GearbxError
from ..routing.calibration import check_shares


def parse_shares(text: str) -> list[float]:
    """Parts of 1 from text such as "0.6,0.3,0.1". Raises GearbxError for anything else."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise GearbxError(f"--shares '{text}' are not numbers with commas between, such as 0.6,0.3,0.1") from error
    check_shares(shares)
    return shares
