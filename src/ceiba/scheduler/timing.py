"""When the next step has to be planned so that the device does not wait for it. Owns that one estimate.

A plan made as soon as the step before it begins is out of date when its turn comes: who arrives meanwhile waits for the
rest of one step and the whole of another. So planning is put off until just before the device is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from ceiba.scheduler.costs import StepCosts

SURE = 0.9
"""What is trusted of the time that a step is expected to take."""
LEADS = 2.0
"""Planning begins so many times what it takes before the device is done, and SPARE seconds more: a device that waits
costs everyone, a request that comes in between waits one step."""
SPARE = 0.0005
FADE = 0.9
"""What is left of a slow plan's time at the next one."""


@dataclass(slots=True)
class PlanTiming:
    costs: StepCosts
    _planning: float = 0.0
    _launching: float = 0.0
    """Seconds, the most of the last steps; 0 before the first."""

    @property
    def lead(self) -> float:
        """Seconds from the decision to plan a step until the device has it; 0 where that is not known."""
        return self._planning + self._launching if self._launching else 0.0

    def planned(self, planning: float, launching: float | None) -> None:
        """A step was planned and launched within so many seconds. ``launching``: None for one with prompts, which may
        take long where it is not captured, and begins with its first kernel."""
        self._planning = max(planning, FADE * self._planning)
        if launching is not None:
            self._launching = max(launching, FADE * self._launching)

    def due(self, begun: float, prefill: int, decode: int) -> float:
        """The moment to plan the next step, while one of so many prompt tokens and decoding rows runs since ``begun``;
        no later than ``begun`` where too little is known."""
        if not self.lead:
            return begun
        return begun + SURE * self.costs.expected(prefill, decode) - LEADS * self.lead - SPARE
