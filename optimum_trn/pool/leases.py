"""Who has which cores, who waits, and who is asked to give them back."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import StoreError

AGING_SECONDS = 30.0  # of waiting raise a priority by one, so that whoever waits comes first in the end


@dataclass(eq=False)
class Lease:
    """A wish for cores, and the cores once it is granted.

    `preemptible` holders are asked (`wanted`) to give them back when a job of a higher priority waits; a holder that
    has done so keeps its place by asking anew.
    """

    job: str
    count: int
    priority: int = 0
    preemptible: bool = False
    since: float = 0.0
    cores: tuple[int, ...] | None = None
    wanted: bool = False
    waited: float = 0.0


@dataclass
class Metrics:
    """Of the leases of one job, in seconds."""

    granted: int = 0
    preempted: int = 0
    waited: float = 0.0
    longest_wait: float = 0.0


@dataclass
class LeaseTable:
    """Cores that are lent: the highest priority first, and in turn among equals; nobody overtakes who waits for more.

    A wait of `AGING_SECONDS` counts as much as one priority, which bounds every wait by what others hold.  Times are
    seconds of any clock that does not go back.
    """

    total: int
    free: list[int] = field(init=False)
    waiting: list[Lease] = field(default_factory=list)
    held: list[Lease] = field(default_factory=list)
    metrics: dict[str, Metrics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.total))

    def ask(self, lease: Lease, now: float) -> None:
        """Wait for cores; `StoreError` if there will never be so many."""
        if not 1 <= lease.count <= self.total:
            raise StoreError(f"{lease.job} asks for {lease.count} cores, and {self.total} are lent in all.")
        lease.since = now
        self.waiting.append(lease)
        self.settle(now)

    def release(self, lease: Lease, now: float) -> None:
        """Give cores back, or wait no more."""
        if lease in self.waiting:
            self.waiting.remove(lease)
        elif lease in self.held:
            self.held.remove(lease)
            self.free = sorted([*self.free, *(lease.cores or ())])
            self._metrics(lease).preempted += lease.wanted
            lease.cores, lease.wanted = None, False
        self.settle(now)

    def settle(self, now: float) -> None:
        """Grant what can be granted, and ask for what the first in the queue lacks."""
        while self.waiting:
            first = max(self.waiting, key=lambda lease: (self._urgency(lease, now), -lease.since))
            if first.count > len(self.free):
                self._preempt_for(first)
                return
            self.waiting.remove(first)
            self.held.append(first)
            first.cores, self.free = tuple(self.free[: first.count]), self.free[first.count :]
            metrics, wait = self._metrics(first), now - first.since
            metrics.granted += 1
            metrics.waited += wait
            metrics.longest_wait = max(metrics.longest_wait, wait)
        for lease in self.held:
            lease.wanted = False

    def _preempt_for(self, first: Lease) -> None:
        missing = first.count - len(self.free) - sum(len(one.cores or ()) for one in self.held if one.wanted)
        candidates = [one for one in self.held if one.preemptible and not one.wanted and one.priority < first.priority]
        for lease in sorted(candidates, key=lambda one: one.priority):
            if missing > 0:
                lease.wanted = True
                missing -= lease.count

    def _urgency(self, lease: Lease, now: float) -> float:
        return lease.priority + int((now - lease.since) / AGING_SECONDS)

    def _metrics(self, lease: Lease) -> Metrics:
        return self.metrics.setdefault(lease.job, Metrics())
