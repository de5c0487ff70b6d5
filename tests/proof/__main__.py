"""Kill small runs until nothing is left to kill, and say what was found.

python -m tests.proof                 every named point, resumes, random moments, system calls, ablations
python -m tests.proof --minutes 60    the same with fresh seeds, until the time is over (or Ctrl-C)
python -m tests.proof --short         a few of each, in seconds
python -m tests.proof --case JSON     one case again, as a violation prints it; --repeat N times
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import msgspec

from .ablations import ABLATIONS
from .lives import Case, Result, can_trace, run_case
from .plan import Planner
from .points import Kill
from .roles import Config


class Proof:
    """Runs cases on a few lanes and keeps the score."""

    def __init__(self, base: Path, lanes: int, until: float | None) -> None:
        self._base = base
        self._until = until
        self._numbers = itertools.count()
        self._pool = ProcessPoolExecutor(lanes, mp_context=multiprocessing.get_context("fork"))
        self._lanes = lanes
        self.cases = 0
        self.fired: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.bad: list[Result] = []

    @property
    def over(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def attempt(self, cases: Iterable[Case], *, score: bool = True) -> list[Result]:
        """Try cases, a few at a time; the results are in their order. Fewer, if the time is over."""
        results: dict[int, Result] = {}
        running: dict[Future[Result], int] = {}
        todo = iter(cases)
        exhausted = False
        for at in itertools.count():
            case = None if exhausted or self.over else next(todo, None)
            exhausted = case is None
            if case is not None:
                where = self._base / f"case-{next(self._numbers)}"
                running[self._pool.submit(run_case, case, where)] = at
            while running and (exhausted or len(running) >= 2 * self._lanes):
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    result = results[running.pop(future)] = future.result()
                    if score:
                        self._score(result)
            if exhausted and not running:
                return [results[at] for at in sorted(results)]
        raise AssertionError("unreachable")

    def _score(self, result: Result) -> None:
        self.cases += 1
        for kill in result.fired:
            kill = kill.replace("orchestrator:", "one process:") if result.case.solo else kill
            self.fired[re.sub(r" #\d+", "", kill)] += 1
        self.rows.update(result.rows)
        if result.violations:
            self.bad.append(result)
            print(f"\nVIOLATED by {', '.join(result.fired) or 'a run without a kill'}:")
            for violation in result.violations:
                print(f"  - {violation}")
            print(f"  again: {again(result.case)}\n  left in: {self._base}", flush=True)

    def close(self) -> None:
        self._pool.shutdown()


def again(case: Case) -> str:
    """The command that tries a case again."""
    plain = msgspec.structs.replace(case, expected=None)
    return f"python -m tests.proof --case '{msgspec.json.encode(plain, order='sorted').decode()}'"


def ablated(proof: Proof, names: Sequence[str], tries: int) -> list[str]:
    """Take protections away; returns those whose absence no judge noticed."""
    unseen = []
    for name in names:
        seen: list[str] = []
        for i in range(tries):
            for result in proof.attempt([_ablated(name, i)], score=False):
                # A protection that is not there any more to be taken away is not one whose absence was seen.
                seen += [v for v in result.violations if "AttributeError" not in v and "TypeError" not in v]
            if seen or proof.over:
                break
        print(f"  {name.replace('_', ' '):42} {seen[0][:100] if seen else 'NOT SEEN'}", flush=True)
        if not seen:
            unseen.append(name)
    return unseen


def _ablated(name: str, i: int) -> Case:
    # Long saves show what must wait for them; short ones let files go between the cut and the kill.
    config = Config(
        seed=i, steps=10, step_s=0.06, save_s=0.02 if i % 2 else 0.4, error_rate=0.0, ablation=name
    )
    return Case(config, [Kill("orchestrator", "write.batch", 8 + i // 2 % 2, "after")], solo=True)


def table(proof: Proof, seconds: float) -> None:
    """Kills by point, then what was counted."""
    print(f"\n{'killed':>7}  at")
    for kill, n in sorted(proof.fired.items()):
        print(f"{n:7}  {kill}")
    print()
    for name in sorted(proof.rows):
        print(f"{proof.rows[name]:9}  {name}")
    print(
        f"{proof.cases:9}  runs\n{sum(proof.fired.values()):9}  kills\n{len(proof.bad):9}  runs with a violation"
        f"\n{seconds:9.0f}  seconds"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="default: 1, with --torture the time")
    parser.add_argument("--torture", action="store_true", help="go on with fresh seeds")
    parser.add_argument("--minutes", type=float, help="begin no more runs after that")
    parser.add_argument("--short", action="store_true", help="a few of each")
    parser.add_argument("--lanes", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--dir", type=Path, help="where runs live (default: the directory for temporary files)"
    )
    parser.add_argument("--case", help="one case, as printed")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    started = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="prime-io-proof-", dir=args.dir))
    proof = Proof(base, args.lanes, started + args.minutes * 60 if args.minutes else None)
    unseen: list[str] = []
    try:
        if args.case:
            proof.attempt([msgspec.json.decode(args.case, type=Case)] * args.repeat)
        elif args.torture:
            for seed in itertools.count(args.seed if args.seed is not None else int(time.time())):
                if proof.over:
                    break
                print(f"seed {seed}", flush=True)
                everything(proof, seed, occurrences=2)
        elif args.short:
            short(proof, args.seed or 1)
            unseen = ablated(proof, ("releases_do_not_wait_for_saves",), 3)
        else:
            everything(proof, args.seed if args.seed is not None else 1, occurrences=2)
            print("\nprotections taken away, and what the judge says:")
            unseen = ablated(proof, list(ABLATIONS), 5)
            proof.attempt([_ablated("", i) for i in range(2)])  # the control: nothing taken away
    except KeyboardInterrupt:
        print("stopped")
    proof.close()
    table(proof, time.monotonic() - started)
    if not proof.bad:
        shutil.rmtree(base)
    return 1 if proof.bad or unseen else 0


def everything(proof: Proof, seed: int, *, occurrences: int) -> None:
    planner = Planner(seed, proof.attempt)
    traced = can_trace()
    for name, cases in (
        ("named points", planner.points(occurrences)),
        ("points of a resume", planner.resumes(2 * occurrences)),
        ("random moments", planner.moments(30 * occurrences)),
        ("told to stop", planner.stops(12 * occurrences)),
        ("system calls", planner.syscalls(24 * occurrences if traced else 0)),
        ("one process, virtual time", planner.solo(occurrences)),
    ):
        before, at = sum(proof.fired.values()), time.monotonic()
        proof.attempt(cases)
        print(
            f"{name}: {sum(proof.fired.values()) - before} kills, {time.monotonic() - at:.0f} s", flush=True
        )
        if name == "system calls" and not traced:
            print("  (strace is not installed, or may not attach here)")


def short(proof: Proof, seed: int) -> None:
    planner = Planner(seed, proof.attempt)
    chance = random.Random(seed)
    for cases, n in (
        (planner.points(1), 4),
        (planner.resumes(1), 3),
        (planner.moments(1), 1),
        (planner.stops(1), 1),
        (planner.solo(1), 3),
    ):
        proof.attempt(chance.sample(list(cases), n))


if __name__ == "__main__":
    sys.exit(main())
