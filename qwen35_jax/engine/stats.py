"""What an engine counts, and where the host's part of its steps goes. No jax here."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class HostSeconds:
    """Host time spent so far, by what for.

    schedule: deciding what a step runs. build: its inputs. dispatch: handing it to the device.
    collect: waiting for its results and reading them. finish: what came of them.
    """

    schedule: float = 0.0
    build: float = 0.0
    dispatch: float = 0.0
    collect: float = 0.0
    finish: float = 0.0

    def __sub__(self, other: "HostSeconds") -> "HostSeconds":
        return HostSeconds(
            **{one.name: getattr(self, one.name) - getattr(other, one.name) for one in fields(self)}
        )


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment; what counts up does so since it was made.

    finished: sequences by finish reason; one that a stop string ended counts as "abort", for it is
    whoever reads the text that ends it. prompt_tokens, generation_tokens: processed and sampled,
    those of a preempted request's second time not among the latter. non_finite: requests ended
    because the model's logits were not numbers. compiles_after_ready: programs that came late.
    """

    running: int
    waiting: int
    max_num_seqs: int
    kv_tokens: int
    kv_tokens_used: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    non_finite: int
    device_failures: int
    compiles_after_ready: int
    finished: dict[str, int] = field(default_factory=dict)
    host_seconds: HostSeconds = field(default_factory=HostSeconds)

    @property
    def kv_cache_usage(self) -> float:
        """From 0 to 1."""
        return self.kv_tokens_used / self.kv_tokens


class Stopwatch:
    """Adds up the time between marks, by name."""

    def __init__(self, now: float):
        self._now = now
        self.seconds: dict[str, float] = {}

    def start(self, now: float) -> None:
        self._now = now

    def mark(self, name: str, now: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._now
        self._now = now
