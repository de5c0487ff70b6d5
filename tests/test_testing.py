"""`prime_io.testing`: loads whose bytes are known, a trainer that checks them, a clock that jumps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prime_io import Episode, PayloadStore, Rollout
from prime_io.columns import load_traces, spill
from prime_io.testing import FIELD, PRESETS, FakeLoad, VirtualTimeLoop, WrongBytesError, run_virtual


@pytest.fixture
def store(tmp_path: Path) -> PayloadStore:
    return PayloadStore(tmp_path / "payloads", owner=True)


def rollout(member: int = 0, group: str = "env-000001") -> Rollout:
    return Rollout("env", group, {"task": 1}, member, 3, "life")


@pytest.mark.parametrize("model", PRESETS)
def test_shapes_are_those_of_engines(store: PayloadStore, model: str) -> None:
    """Presets: all layers, dense ones zero, distinct ids in range, the narrow dtype; wide models mix widths."""
    load = FakeLoad(store=store, shape=PRESETS[model])
    payload = load.write(rollout())
    [segments] = payload.values()
    shape = PRESETS[model]
    assert {s.dtype for s in segments} == ({"uint8"} if shape.experts <= 256 else {"uint8", "uint16"})
    [name] = payload
    rows, valid = store.gather(segments, FIELD, 0, load.n_tokens(name) - 1)
    assert valid.all() and rows.shape[1:] == (shape.layers, shape.top_k) and rows.dtype == shape.dtype
    sparse = [layer for layer in range(shape.layers) if layer not in shape.dense]
    assert not rows[:, list(shape.dense)].any()
    assert rows.max() < shape.experts
    ids = np.sort(rows[:, sparse], axis=-1)
    assert (ids[..., 1:] != ids[..., :-1]).all()


def test_a_load_is_the_same_everywhere(store: PayloadStore) -> None:
    """Ids, delays, failures and bytes follow from seed, group and member alone."""
    one, same, other = (FakeLoad(store=store, seed=seed, error_rate=0.3) for seed in (1, 1, 2))
    plans = [[load.plan(rollout(i)) for i in range(50)] for load in (one, same, other)]
    assert plans[0] == plans[1] != plans[2]
    assert {plan.fails for plan in plans[0]} == {True, False}
    name = one.plan(rollout()).episode_id
    assert np.array_equal(one.rows(name), same.rows(name))
    assert FakeLoad(store=store, with_lineage=True).plan(rollout()).episode_id == f"{name}@life"


def test_bytes_of_another_trace_are_noticed(store: PayloadStore) -> None:
    """check: what was written passes; another trace's payload, tokens or rows do not."""
    load = FakeLoad(store=store, shape=PRESETS["kimi-k2"], traces=2)

    def stored(member: int) -> Episode:
        return load.episode(rollout(member), load.write(rollout(member)))

    first, second = stored(0), stored(1)
    [a, b] = load_traces(spill(first, store=store).traces, store=store)
    [c, _] = load_traces(spill(second, store=store).traces, store=store)
    assert load.check([a, b, c]) > 0
    renamed = msgspec.structs.replace(a, id=c.id)
    with pytest.raises(WrongBytesError, match=f"trace {c.id}: token_ids"):
        load.check([renamed])
    swapped = msgspec.structs.replace(
        a, samples=[msgspec.structs.replace(a.samples[0], payload=c.samples[0].payload)]
    )
    with pytest.raises(WrongBytesError, match=f"trace {a.id}: {FIELD}"):
        load.check([swapped])
    store.reclaim([a.samples[0].payload[0].file])
    with pytest.raises(FileNotFoundError):
        load.check([a])


def test_virtual_time_jumps_and_keeps_order() -> None:
    """Virtual time: sleeping costs nothing, timers fire in order, work in threads takes no time."""
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(seconds)
        await asyncio.to_thread(time.sleep, 0.02)
        seen.append((name, round(loop.time(), 6)))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 0.5), sleeper("soon", 0.501))

    started = time.monotonic()
    run_virtual(main())
    assert time.monotonic() - started < 5
    assert seen == [("early", 0.5), ("soon", 0.501), ("late", 7200.0)]


def test_virtual_time_says_when_nothing_can_happen() -> None:
    """Virtual time: waiting for what never comes is an error, not a hang."""

    async def main() -> None:
        await asyncio.Event().wait()

    loop = VirtualTimeLoop()
    with pytest.raises(RuntimeError, match="waits for ever"):
        loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
    loop.close()
