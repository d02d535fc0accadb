"""A PID controller that does not wind up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gains:
    """Factors of the error (proportional), of its sum (integral) and of its change (derivative)."""

    proportional: float = 0.1
    integral: float = 0.85
    derivative: float = 0.05


GAINS = Gains()


class PID:
    """u = Kp e + I + Kd (e - e'), with I the sum of Ki e.

    **Anti-windup** by back-calculation: `track` takes the actuator's real position. Where the actuator could not follow
    u (it is at its end, or it moves in steps), the integral becomes what explains that position. So it never
    accumulates what the actuator cannot do. (Astrom and Hagglund, PID Controllers, 1995, section 3.5, with a tracking
    time of one sample.)
    """

    def __init__(self, gains: Gains = GAINS):
        self.gains = gains
        self.integral = 0.0
        self._error = self._slope = 0.0

    def update(self, error: float) -> float:
        """The position that the actuator should take."""
        self._slope, self._error = error - self._error, error
        self.integral += self.gains.integral * error
        return self.integral + self._immediate()

    def track(self, actual: float) -> None:
        """Take the position that the actuator has."""
        self.integral = actual - self._immediate()

    def rest(self, actual: float) -> None:
        """There is no error (it is within the dead band), and the actuator stays at its position."""
        self._error = self._slope = 0.0
        self.integral = actual

    def _immediate(self) -> float:
        return self.gains.proportional * self._error + self.gains.derivative * self._slope
