"""Which cases to try: every named point of every process, resumes included, then random moments and system calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from prime_io.testing import PRESETS

from .lives import Case, Result
from .points import Kill
from .roles import Config

RESUMING = ("prepare/", "restore/", "sweep/")
SYSCALLS = (
    "linkat",
    "unlinkat",
    "renameat,renameat2",
    "fsync",
    "fdatasync",
    "mkdirat",
    "write,pwrite64",
    "openat",
)
QUIET = Config(quiet=True, max_off_policy_steps=50, steps=6)

Try = Callable[[Sequence[Case]], list[Result]]


def variant(chance: random.Random) -> Config:
    """One run or another: all shapes, all ways to pin, traces that share files, slow and fast trainers."""
    return Config(
        seed=chance.randrange(1 << 30),
        shape=chance.choice(list(PRESETS)),
        traces=chance.choice((1, 1, 2)),
        pin=chance.choice(("link", "link", "link", "copy", "skip")),
        keep_last=chance.choice((1, 1, 2)),
        step_s=chance.choice((0.02, 0.06)),
        save_s=chance.choice((0.0, 0.02, 0.08)),
        max_off_policy_steps=chance.choice((1, 3, 3)),
        filter_zero_advantages=chance.random() < 0.8,
        overload_s=chance.choice((0.0, 0.0, 0.07)),
        per_token=chance.random() < 0.25,
    )


class Planner:
    """Draws cases from a seed, after looking at runs that are not killed."""

    def __init__(self, seed: int, attempt: Try) -> None:
        self._chance = random.Random(seed)
        self._seed = seed
        busy = Config(seed=seed, step_s=0.05)
        late = Kill("orchestrator", "save.finish", 2, "after")
        self._quiet = msgspec.structs.replace(QUIET, seed=seed)
        first, resumed, solo, solo_resumed = attempt(
            [
                Case(busy),
                Case(busy, [late]),
                Case(self._quiet, solo=True),
                Case(self._quiet, [late], solo=True),
            ]
        )
        self.looked = [first, resumed, solo, solo_resumed]
        self._first, self._resumed = first, resumed
        self._life_ms = max(400, int(first.seconds * 600))
        self._solo, self._solo_resumed = solo, solo_resumed

    # -- real processes

    def points(self, occurrences: int) -> Iterator[Case]:
        """Every named point in a first life, some of its occurrences each, and a resume from there."""
        for role in ("orchestrator", "trainer", "writer-0"):
            for kill in self._kills(role, self._first.counts, self._first.halves, occurrences):
                yield Case(variant(self._chance), [self._scoped(kill)])

    def resumes(self, rounds: int) -> Iterator[Case]:
        """Killed, and killed again at every point of what a resume does; some a third time."""
        for role in ("prepare", "orchestrator") * rounds:
            kills = self._kills(role, self._resumed.resumed_counts, self._resumed.halves, 2)
            again = [kill for kill in kills if kill.point.startswith(RESUMING)]
            for kill in again:
                kills = [self._somewhere(), self._scoped(kill)]
                if self._chance.random() < 0.3:
                    kills.append(self._chance.choice(again))
                config = variant(self._chance)
                yield Case(config, kills, rewind=config.keep_last == 2 and self._chance.random() < 0.3)

    def moments(self, n: int) -> Iterator[Case]:
        """Random moments, up to three lives in a row."""
        for _ in range(n):
            kills = [self._moment(self._life_ms)]
            while len(kills) < 3 and self._chance.random() < 0.4:
                kills.append(self._moment(self._life_ms // 2))
            yield Case(variant(self._chance), kills, rewind=self._chance.random() < 0.1)

    def stops(self, n: int) -> Iterator[Case]:
        """Told to stop at a random moment, and some killed on the way out or when they go on."""
        for _ in range(n):
            kills = [
                Kill(
                    "orchestrator", "term", self._chance.randrange(20, self._life_ms), "at", everything=False
                )
            ]
            if self._chance.random() < 0.4:
                kills.append(self._moment(self._life_ms // 2))
            yield Case(variant(self._chance), kills)

    def syscalls(self, n: int) -> Iterator[Case]:
        """At a system call inside the engine's steps; in a first life, or in the one that resumes."""
        for i in range(n):
            names = SYSCALLS[i % len(SYSCALLS)]
            role = self._chance.choice(("orchestrator", "orchestrator", "trainer", "prepare"))
            resuming = role == "prepare" or self._chance.random() < 0.4
            nth = self._chance.randrange(1, 6 if resuming else 25)
            kill = self._scoped(Kill(role, f"syscall:{names}", nth))
            yield Case(variant(self._chance), [self._somewhere(), kill] if resuming else [kill])

    # -- one process in virtual time

    def solo(self, occurrences: int) -> Iterator[Case]:
        """Every named point; afterwards each step trains the traces that it would have trained."""
        expected = self._solo.steps
        for role in ("prepare", "orchestrator"):
            for kill in self._kills(role, self._solo.counts, self._solo.halves, occurrences):
                yield Case(self._quiet, [kill], solo=True, expected=expected)
            for kill in self._kills(
                role, self._solo_resumed.resumed_counts, self._solo_resumed.halves, occurrences
            ):
                if kill.point.startswith(RESUMING):
                    first = Kill("orchestrator", "write.ack", self._chance.randrange(2, 7), "after")
                    yield Case(self._quiet, [first, kill], solo=True, expected=expected)

    # -- parts

    def _kills(
        self, role: str, counts: dict[str, dict[str, int]], halves: dict[str, list[str]], occurrences: int
    ) -> list[Kill]:
        kills = []
        for point, n in sorted(counts.get(role, {}).items()):
            for when in ("before", "half", "after"):
                if when == "half" and point not in halves.get(role, ()):
                    continue
                # The last ones may not come in another run.
                among = range(1, max(2, n * 4 // 5 + 1))
                for nth in sorted(self._chance.sample(among, min(occurrences, len(among)))):
                    kills.append(Kill(role, point, nth, when))
        return kills

    def _scoped(self, kill: Kill) -> Kill:
        alone = kill.role.startswith("writer") or (kill.role != "prepare" and self._chance.random() < 0.35)
        return msgspec.structs.replace(kill, everything=not alone)

    def _somewhere(self) -> Kill:
        """A first kill late enough to leave a checkpoint, work since, and sometimes stragglers."""
        point, nth = self._chance.choice(
            [("save.finish", 2), ("save.finish", 3), ("write.batch", 4), ("write.batch", 6), ("reclaim", 15)]
        )
        return self._scoped(Kill("orchestrator", point, nth, self._chance.choice(("before", "after"))))

    def _moment(self, until: int) -> Kill:
        role = self._chance.choice(("orchestrator", "orchestrator", "trainer", "writer-0"))
        kill = Kill(role, "time", self._chance.randrange(10, until), "at")
        return self._scoped(kill)
