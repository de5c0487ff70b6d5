"""`TrainSource`: deterministic, resumable, and missing rollouts before new tasks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prime_io import Environment, TaskRequest, TrainSource, decode_state, encode_state

ENVS = [
    Environment("math", [{"q": i} for i in range(5)], 4, weight=2.0),
    Environment("code", ["a", "b", "c"], 8),
]


def draw(source: TrainSource, n: int) -> list[TaskRequest]:
    return [source.next_task(step) for step in range(n)]


def test_the_order_comes_from_the_seed() -> None:
    """Two sources of one seed draw the same; another seed draws something else."""
    assert draw(TrainSource(envs=ENVS, seed=1), 40) == draw(TrainSource(envs=ENVS, seed=1), 40)
    assert draw(TrainSource(envs=ENVS, seed=1), 40) != draw(TrainSource(envs=ENVS, seed=2), 40)


def test_every_task_is_drawn_once_an_epoch() -> None:
    """The sampler neither skips nor repeats a task before all of its environment have been drawn."""
    requests = [r for r in draw(TrainSource(envs=ENVS, seed=3), 200) if r.env_name == "math"]
    for epoch in range(len(requests) // 5):
        tasks = [r.task["q"] for r in requests[5 * epoch : 5 * epoch + 5]]
        assert sorted(tasks) == list(range(5))
    assert len({r.group_id for r in requests}) == len(requests)


def test_rule_02_a_restored_source_goes_on_where_it_was_cut() -> None:
    """Rule 2: cursors and the random state go through a checkpoint unchanged."""
    source = TrainSource(envs=ENVS, seed=4)
    draw(source, 17)
    state = decode_state(encode_state(source.state_dict()))
    expected = draw(source, 30)
    restored = TrainSource(envs=ENVS, seed=4)
    restored.load_state_dict(state)
    assert draw(restored, 30) == expected


def test_rule_04_resumed_requests_come_first_and_do_not_advance_the_sampler() -> None:
    """Rule 4: what a resume asks for again is handed out before any new task, without a draw."""
    plain, source = TrainSource(envs=ENVS, seed=5), TrainSource(envs=ENVS, seed=5)
    request = TaskRequest("math", {"q": 3}, 2, 3, "math-000001", 4)
    source.resumed.append(request)
    assert source.next_task(9) == request
    assert source.drawn == {"math": 0, "code": 0}
    assert draw(source, 10) == draw(plain, 10)


def test_another_set_of_environments_is_a_clear_sentence() -> None:
    """A checkpoint with tasks of an environment that is gone says which; a new environment just begins."""
    source = TrainSource(envs=ENVS, seed=6)
    draw(source, 5)
    state = source.state_dict()
    with pytest.raises(ValueError, match=r"environments \['code'\] that are not configured: add them"):
        TrainSource(envs=ENVS[:1], seed=6).load_state_dict(state)
    more = TrainSource(envs=[*ENVS, Environment("new", [1], 2)], seed=6)
    more.load_state_dict(state)
    assert more.drawn["new"] == 0


def test_an_unknown_format_is_a_clear_sentence() -> None:
    """State of another format version is refused with what to do."""
    with pytest.raises(ValueError, match="format 7; this version of prime-io reads 1"):
        TrainSource(envs=ENVS, seed=0).load_state_dict({"format": 7})


@pytest.mark.parametrize("broken", [{"drawn": None}, {"rng": "[]"}, {"rng": "[3,[1],null]"}, {"rng": None}])
def test_a_state_that_is_not_complete_is_a_clear_sentence(broken: dict[str, Any]) -> None:
    """Bug: a source state with a part missing or torn was a KeyError, and half of it was taken."""
    source = TrainSource(envs=ENVS, seed=0)
    draw(source, 3)
    state = source.state_dict()
    fresh = TrainSource(envs=ENVS, seed=0)
    for bad in (state | broken, {name: value for name, value in state.items() if name not in broken}):
        with pytest.raises(ValueError, match=r"source state is not complete .*; resume from another step"):
            fresh.load_state_dict(bad)
    assert draw(fresh, 3) == draw(TrainSource(envs=ENVS, seed=0), 3)


def test_a_task_that_cannot_travel_is_an_error_where_it_is_drawn() -> None:
    """Bug: a task with an array failed the first checkpoint, and a tuple came back from it as a list."""
    for task, why in (
        ({"q": [1, (2, 3)]}, r"TaskRequest env-000000: task.q\[1\] is a tuple; .* use a list"),
        ({"x": np.zeros(2)}, "task.x is a numpy.ndarray; allowed are None, bool, int"),
        (1 << 64, "task is an int beyond 64 bits"),
        ({"x": object()}, "task.x is a object"),
    ):
        with pytest.raises(TypeError, match=why):
            TrainSource(envs=[Environment("env", [task], 2)], seed=0).next_task(1)


def test_environments_are_checked_at_construction() -> None:
    """An environment without tasks is the user's mistake, said at once."""
    with pytest.raises(ValueError, match="with tasks"):
        TrainSource(envs=[msgspec.structs.replace(ENVS[0], tasks=[])], seed=0)
