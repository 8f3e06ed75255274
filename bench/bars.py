"""What the project asks of its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a metric is asked to reach: at least `value`, or at most."""

    value: float
    least: bool = True

    def text(self) -> str:
        """For the table."""
        return f"{'>=' if self.least else '<='} {self.value:g}"

    def verdict(self, value: float, interval: Sequence[float] | None) -> str:
        """yes or no by the value; with the interval, whether chance could change it."""
        sign = 1 if self.least else -1
        met = sign * value >= sign * self.value
        sure = interval is None or all(
            (sign * bound >= sign * self.value) == met for bound in interval
        )
        return ("yes" if met else "no") + ("" if sure else ", within the interval")


BARS = {
    "replay_acceptance": Bar(value=0.75),
    "tokens_per_pass": Bar(value=3.0),
    "speedup_batch1": Bar(value=1.8),
    "speedup_worst_domain": Bar(value=0.97),
    "vs_generate": Bar(value=3.0),
    "vs_assisted": Bar(value=2.2),
    "batch8_vs_assisted": Bar(value=5.0),
    "batch8_vs_plain": Bar(value=1.0),
    "capture_cost": Bar(value=0.02, least=False),
    "overhead_share": Bar(value=0.10, least=False),
    "append_per_s": Bar(value=5000),
    "forwarder_mb_s": Bar(value=60),
    "compactor_mb_s_core": Bar(value=40),
    "emit_p99_ms": Bar(value=1, least=False),
    "catalog_commit_ms": Bar(value=20, least=False),
    "read_positions_s_core": Bar(value=0.5e6),
    "kills": Bar(value=1000),
    "lost": Bar(value=0, least=False),
}
