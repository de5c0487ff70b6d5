"""`TrainSource`: which task is next. Deterministic from its seed, and resumable."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .types import ScoredGroup, TaskRequest

FORMAT = 1


class Environment(msgspec.Struct, frozen=True):
    """Tasks of one kind: `group_size` rollouts each, drawn with `weight` relative to other environments.

    A task is None, bool, int, float, str, bytes, or a list or dict of them, checked when it is drawn. The order is
    reshuffled every time all tasks have been drawn.
    """

    name: str
    tasks: Sequence[Any]
    group_size: int
    weight: float = 1.0


class TrainSource:
    """Draws environments by weight and their tasks in shuffled order, after what a resume has to finish.

    `resumed` holds the missing rollouts of restored open groups: they come before any new task and do not
    advance the sampler. Override `on_result` for a curriculum; its state belongs into `state_dict`.
    """

    def __init__(self, *, envs: Iterable[Environment], seed: int) -> None:
        self.envs = {env.name: env for env in envs}
        if not self.envs or any(not env.tasks or env.group_size < 1 for env in self.envs.values()):
            raise ValueError(
                "TrainSource needs at least one environment, each with tasks and a group_size >= 1"
            )
        self.resumed: deque[TaskRequest] = deque()
        self._seed = seed
        self._rng = random.Random(f"{seed}/environments")
        self._drawn = dict.fromkeys(self.envs, 0)

    def next_task(self, step: int) -> TaskRequest:
        """The next request; a new group's id is `<env>-<how many were drawn before>`."""
        if self.resumed:
            return self.resumed.popleft()
        env = self._rng.choices(list(self.envs.values()), weights=[env.weight for env in self.envs.values()])[
            0
        ]
        n = self._drawn[env.name]
        self._drawn[env.name] += 1
        epoch, cursor = divmod(n, len(env.tasks))
        task = env.tasks[self._order(env, epoch)[cursor]]
        return TaskRequest(env.name, task, step, env.group_size, f"{env.name}-{n:06d}")

    @property
    def drawn(self) -> dict[str, int]:
        """Tasks drawn so far, by environment."""
        return dict(self._drawn)

    def on_result(self, group: ScoredGroup) -> bool:
        """Called once per scored group, in the instant its traces are queued. True if it was of use."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Cursors and the random state (as text) of this instant."""
        return {
            "format": FORMAT,
            "drawn": dict(self._drawn),
            "rng": json.dumps(self._rng.getstate()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. New environments start at their beginning.

        ValueError for another format, for a state with a part missing, or if an environment of the state is not
        configured any more.
        """
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the checkpoint's source state has format {state.get('format')!r}; this version of "
                f"prime-io reads {FORMAT}: resume with the version that wrote it"
            )
        try:
            drawn = dict(state["drawn"])
            version, internal, gauss = json.loads(state["rng"])
            rng = random.Random()
            rng.setstate((version, tuple(internal), gauss))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint's source state is not complete ({type(error).__name__}: {error}); resume from "
                "another step"
            ) from error
        gone = sorted(set(drawn) - set(self.envs))
        if gone:
            raise ValueError(
                f"the checkpoint drew tasks of environments {gone} that are not configured: add them, or start "
                "a new run"
            )
        self._drawn = dict.fromkeys(self.envs, 0) | drawn
        self._rng = rng

    def _order(self, env: Environment, epoch: int) -> list[int]:
        order = list(range(len(env.tasks)))
        random.Random(f"{self._seed}/{env.name}/{epoch}").shuffle(order)
        return order
