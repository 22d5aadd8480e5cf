"""What a seed means: the jobs to be sent and the faults to be made, with their times.  No clock, no I/O."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

__all__ = ["LEASE", "SLOTS", "Fault", "Job", "faults", "jobs"]

#: The lease in the torture (seconds), and how many worker commands there are.
LEASE, SLOTS = 3.0, 3

#: With what a broker comes back from a restart.
DATA = ["keeping its data", "empty", "with old data"]


class Job(NamedTuple):
    """Something for the producer to do.

    Parameters:
      at(float): Seconds since the start.
      kind(str): What to send; ``"copy"`` puts a copy of an earlier message into the broker behind our back.
      values(dict): With which values.
    """

    at: float
    kind: str
    values: dict[str, Any]


class Fault(NamedTuple):
    """Something that goes wrong.

    Parameters:
      at(float): Seconds since the start.
      kind(str)
      target(str): What it happens to; one thing suffers one fault at a time.
      seconds(float): For how long.
      detail(str): In which way.
    """

    at: float
    kind: str
    target: str
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target} {self.detail}".rstrip() + lasting


def jobs(seed: int, seconds: float) -> list[Job]:
    """Return what is sent, five or six things a second."""
    rng = random.Random(f"jobs {seed}")
    makers = {
        "quick": (30, lambda: {"callback": rng.random() < 0.3}),
        "side": (8, dict),
        "slow": (6, lambda: {"seconds": rng.choice([0.3, 1.0, LEASE + 1.5, LEASE + 3])}),
        "delayed": (10, lambda: {"delay": rng.choice([50, 300, 1500, 6000])}),
        "flaky": (8, lambda: {"failures": rng.randint(1, 3), "callback": rng.random() < 0.5}),
        "breaks": (3, dict),
        "pipeline": (9, lambda: {"stages": rng.randint(2, 4), "delay": rng.choice([None, None, 400])}),
        "parent": (6, lambda: {"children": rng.randint(1, 5), "seconds": rng.choice([0.0, 0.5, LEASE + 1])}),
        "coroutine": (5, dict),
        "limited": (2, dict),
        "careful": (3, lambda: {"seconds": rng.choice([0.0, 1.0, 2.5])}),
        "once": (3, lambda: {"seconds": rng.choice([0.0, 1.0, 2.5])}),
        "interruptible": (4, lambda: {"seconds": rng.choice([0.2, 2.0, LEASE + 1])}),
        "copy": (16, lambda: {"which": rng.random(), "stranded": rng.random() < 0.15}),
        "stranger": (4, lambda: {"delay": rng.choice([None, None, 500]), "stranded": rng.random() < 0.2}),
        "garbage": (1, dict),
    }
    kinds, weights = list(makers), [weight for weight, _ in makers.values()]
    at, plan = 0.3, []
    while at < seconds - 1:
        kind = rng.choices(kinds, weights)[0]
        plan.append(Job(at, kind, makers[kind][1]()))
        at += rng.expovariate(1 / 0.18)
    return plan


def faults(seed: int, seconds: float, database: str) -> list[Fault]:
    """Return what goes wrong."""
    rng = random.Random(f"faults {seed}")
    slot = lambda: f"worker-{rng.randrange(SLOTS)}"  # noqa: E731
    direction = lambda: rng.choice(["requests", "replies", "both"])  # noqa: E731
    makers: dict[str, tuple[int, Any]] = {
        "kill": (14, lambda: (slot(), 0.0, "")),
        "kill master": (5, lambda: (slot(), rng.uniform(1, 6), "")),
        "deploy": (8, lambda: (slot(), 0.0, "")),
        "deploy hastily": (5, lambda: (slot(), rng.uniform(0.05, 2), "")),
        "kill all": (2, lambda: ("worker-0", 0.0, "")),
        "freeze": (7, lambda: (slot(), rng.choice([0.5, LEASE - 1, LEASE + 2, LEASE + 4]), "")),
        "flush": (5, lambda: ("broker", 0.0, "")),
        "restart": (
            5,
            lambda: ("broker", rng.uniform(0, 3), rng.choice(["keeping its data", "empty", "with old data"])),
        ),
        "stall": (5, lambda: ("broker", rng.choice([1.0, 3.0, 6.0, 12.0]), "")),
        "cut": (4, lambda: ("broker link", rng.uniform(0.1, 5), "")),
        "drop": (5, lambda: ("broker link", 0.0, "")),
        "black hole": (5, lambda: ("broker link", rng.uniform(0.3, 5), direction())),
    }
    makers["cut worker off from broker"] = (3, lambda: (slot(), rng.uniform(0.5, LEASE + 3), ""))
    if database == "sqlite":
        makers["lock"] = (14, lambda: ("database", rng.choice([0.3, 1.0, 3.0, 7.0]), ""))
    else:
        makers |= {
            "stall database": (4, lambda: ("database", rng.choice([1.0, 3.0, 6.0]), "")),
            "restart database": (3, lambda: ("database", rng.uniform(0, 3), rng.choice(["fast", "immediate"]))),
            "cut database": (4, lambda: ("database link", rng.uniform(0.1, 5), "")),
            "drop database": (6, lambda: ("database link", 0.0, "")),
            "cut worker off": (7, lambda: (slot(), rng.choice([1.0, LEASE + 1, LEASE + 3]), direction())),
            "end connections": (4, lambda: ("database", 0.0, "")),
            "lock rows": (4, lambda: ("database", rng.choice([0.3, 1.0, LEASE + 2]), rng.choice(["active", "all"]))),
            "black hole database": (5, lambda: ("database link", rng.uniform(0.3, 5), direction())),
        }
    kinds, weights = list(makers), [weight for weight, _ in makers.values()]
    at, plan = 2.0, []
    busy: dict[str, float] = {}
    while at < seconds - 1:
        kind = rng.choices(kinds, weights)[0]
        target, lasting, detail = makers[kind][1]()
        if busy.get(target, 0.0) <= at:
            lasting = min(lasting, max(0.0, seconds - at))
            plan.append(Fault(at, kind, target, lasting, detail))
            # A worker needs some seconds to come back, and is of no use to the torture before.
            busy[target] = at + lasting + (4 if target.startswith("worker") else 0.5)
        at += rng.uniform(0.2, 1.3)
    return plan
