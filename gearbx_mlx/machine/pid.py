"""A PID controller that does not wind up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gains:
    """Of the error (proportional), its sum (integral) and its change (derivative)."""

    proportional: float = 0.1
    integral: float = 0.85
    derivative: float = 0.05


GAINS = Gains()


class PID:
    """u = Kp e + I + Kd (e - e'), with I the sum of Ki e.

    **Anti-windup** by back-calculation: `track` is told what became of u. Where the actuator could not follow (it is at
    its end, it moves in steps, something else holds it), the integral is set to what explains the place where it
    is, and so never holds what could not be had. (Astrom and Hagglund, PID Controllers, 1995, section 3.5, with a
    tracking time of one sample.)
    """

    def __init__(self, gains: Gains = GAINS):
        self.gains = gains
        self.integral = 0.0
        self._error = self._slope = 0.0

    def update(self, error: float) -> float:
        """What the actuator should be."""
        self._slope, self._error = error - self._error, error
        self.integral += self.gains.integral * error
        return self.integral + self._immediate()

    def track(self, actual: float) -> None:
        """What the actuator is."""
        self.integral = actual - self._immediate()

    def rest(self, actual: float) -> None:
        """Within the dead band: there is no error, and the actuator stays what it is."""
        self._error = self._slope = 0.0
        self.integral = actual

    def _immediate(self) -> float:
        return self.gains.proportional * self._error + self.gains.derivative * self._slope
