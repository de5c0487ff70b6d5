"""Protections taken away, one at a time: a judge that finds nothing then sees nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prime_io import Orchestrator, Pins, TrainSource
from prime_io.restore import _Judge


def releases_do_not_wait_for_saves(orchestrator: Orchestrator) -> None:
    ledger = orchestrator.sink.ledger
    ledger.open_snapshot = set  # type: ignore[method-assign]
    ledger.close_snapshot = lambda snapshot: None  # type: ignore[method-assign]


def files_go_when_a_batch_ships(orchestrator: Orchestrator) -> None:
    sink, take = orchestrator.sink, orchestrator.sink.take_packed

    def taken() -> Any:
        batch = take()
        if batch is not None:
            sink.trained(batch.step)
        return batch

    sink.take_packed = taken  # type: ignore[method-assign]


def restore_links_nothing_back(orchestrator: Orchestrator) -> None:
    Pins.link_back = lambda self, files: {}  # type: ignore[method-assign]


def restore_checks_nothing(orchestrator: Orchestrator) -> None:
    """Pins are not linked back, and nobody looks."""
    restore_links_nothing_back(orchestrator)
    _Judge.present = lambda self, kind, work: list(work)  # type: ignore[method-assign]


def sweep_ignores_the_ledger(orchestrator: Orchestrator) -> None:
    orchestrator._roots = set  # type: ignore[method-assign]


def no_sweep(orchestrator: Orchestrator) -> None:
    async def nothing() -> None: ...

    orchestrator.sweep = nothing  # type: ignore[method-assign,assignment]


def the_sampler_starts_again(orchestrator: Orchestrator) -> None:
    TrainSource.load_state_dict = lambda self, state: None  # type: ignore[method-assign]


def missing_rollouts_are_not_asked_for(orchestrator: Orchestrator) -> None:
    load = orchestrator.sink.load_state_dict

    async def forgetful(state: Any, **options: Any) -> Any:
        report, _ = await load(state, **options)
        return report, []

    orchestrator.sink.load_state_dict = forgetful  # type: ignore[method-assign]


def the_queue_is_not_saved(orchestrator: Orchestrator) -> None:
    state = orchestrator.sink.state_dict
    orchestrator.sink.state_dict = lambda groups: state(groups) | {"queue": []}  # type: ignore[method-assign]


def drops_are_not_counted(orchestrator: Orchestrator) -> None:
    orchestrator.sink.on_drop = None


ABLATIONS: dict[str, Callable[[Orchestrator], None]] = {
    function.__name__: function
    for function in (
        releases_do_not_wait_for_saves,
        files_go_when_a_batch_ships,
        restore_links_nothing_back,
        restore_checks_nothing,
        sweep_ignores_the_ledger,
        no_sweep,
        the_sampler_starts_again,
        missing_rollouts_are_not_asked_for,
        the_queue_is_not_saved,
        drops_are_not_counted,
    )
}
