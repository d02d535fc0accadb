"""How much precision the state of the machine allows (Manifest document, "Architecture").

"If thermal state is nominal and battery exceeds 50%, allow all layers to use max_precision. Under throttling or low
battery, shift layers toward min_precision starting with the least sensitive." The document does not say how far. Here
it is a share of the way from the fewest bytes to the most: 1 is every layer at its most bits, 0 at its fewest.
"""

from .state import THERMAL, MachineState

THERMAL_SHARES = dict(zip(THERMAL, (1.0, 2 / 3, 1 / 3, 0.0)))
ENOUGH_CHARGE = 0.5
LITTLE_CHARGE = 0.1
MEMORY_FREE, MEMORY_FULL = 0.85, 0.95


def between(value: float, least: float, most: float) -> float:
    """The place of a value between two others: 0 up to the first, 1 from the second on."""
    return min(1.0, max(0.0, (value - least) / (most - least)))


def shares(state: MachineState) -> dict[str, float]:
    """The share that each known part of the state allows.

    The charge counts unless the machine is on a charger. Memory counts because weights that are not read may be paged
    out: fewer planes are a smaller working set.
    """
    found = {}
    if state.thermal is not None:
        found["thermal"] = THERMAL_SHARES[state.thermal]
    if state.battery is not None and not state.charging:
        found["battery"] = between(state.battery, LITTLE_CHARGE, ENOUGH_CHARGE)
    if state.memory is not None:
        found["memory"] = 1.0 - between(state.memory, MEMORY_FREE, MEMORY_FULL)
    return found


def budget(state: MachineState) -> float:
    """The smallest share; 1 where nothing is known."""
    return min(shares(state).values(), default=1.0)


class SteadyBudget:
    """A budget that falls at once, and rises only after a while: caps must not follow a reading up and down.

    Args:
        patience: readings in a row that have to be higher; their lowest is then the budget.
        step: the smallest rise, except to 1.
    """

    def __init__(self, patience: int = 5, step: float = 0.02):
        self.patience = patience
        self.step = step
        self.share = 1.0
        self._higher: list[float] = []

    def update(self, state: MachineState) -> float:
        share = budget(state)
        if share <= self.share:
            self._higher.clear()
            if share <= self.share - self.step or share == 0.0:
                self.share = share
            return self.share
        self._higher.append(share)
        if len(self._higher) >= self.patience:
            lowest = min(self._higher)
            if lowest >= self.share + self.step or lowest == 1.0:
                self.share = lowest
            self._higher.clear()
        return self.share
