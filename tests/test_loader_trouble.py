"""The loader in trouble: signals at bad moments, other lives, readers that start alone, odd but allowed input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loading import EXPERTS, FIELDS, PIXELS, Run, arrays_of, check
from prime_io import CheckpointManager, Exchange, FieldSpec, LineageLeftError, prepare_resume

pytest.importorskip("torch")

from prime_io import PayloadLoader, Ranks


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def loader(run: Run, **options: Any) -> PayloadLoader:
    given: dict[str, Any] = {"seq_len": 64, "start": 1, "ranks": Ranks.alone(), **options}
    return PayloadLoader(run.store, given.pop("exchange", run.exchange), given.pop("fields", FIELDS), **given)


def test_a_free_field_without_any_row_is_absent(run: Run) -> None:
    """Bug guarded: a text-only sample of a multimodal run, whose pixels have no rows, ended the trainer with a
    KeyError, again after each resume."""
    arrays = arrays_of(1, 5)
    arrays[PIXELS] = np.zeros((0, 4), np.float32)
    run.publish(1, [run.trace("a", [arrays])])
    with loader(run) as subject:
        [micro_batch] = list(next(iter(subject)))
        assert PIXELS not in micro_batch.payload
        assert check(micro_batch, {"a": [arrays]}) == ["a"]


def test_a_signal_between_a_read_and_the_meeting_ends_the_loader(run: Run) -> None:
    """Bug guarded: a micro-batch was lost when a handler raised there, and the next step's took its place."""

    class Interrupted(Exchange):
        looks = 0

        def look_for(self, step: int) -> Any:
            self.looks += 1
            if self.looks == 2:
                raise KeyboardInterrupt
            return super().look_for(step)

    run.batch(1, [40] * 5)
    run.batch(2, [40] * 2)
    with loader(run, exchange=Interrupted(run.lineage)) as subject:
        step = next(iter(subject))
        with pytest.raises(KeyboardInterrupt):
            list(step)
        for again in (lambda: list(step), lambda: subject.done(1)):
            with pytest.raises(RuntimeError, match="cannot go on"):
                again()


def test_a_reader_of_a_left_life_ends(run: Run) -> None:
    """Bug guarded: a trainer of a life that was resumed waited for ever, and could still acknowledge."""
    run.batch(1, [5])
    with loader(run) as subject:
        step = next(iter(subject))
        list(step)
        run.store.close()
        prepare_resume(run.root, None)
        with pytest.raises(LineageLeftError):
            subject.done(1)
    assert not (run.lineage.directory / "acks").exists()
    with pytest.raises(LineageLeftError):
        run.exchange.wait_batch(2)


def test_a_reader_that_was_restarted_alone_is_told(run: Run) -> None:
    """Bug guarded: it waited for ever for a batch that its life has trained and removed."""
    run.batch(1, [5])
    run.batch(2, [5])
    run.exchange.forget(before=2)
    with loader(run) as subject, pytest.raises(Exception, match=r"batch 2 is there.*prepare_resume"):
        next(iter(subject))


def test_arguments_that_cannot_work_are_refused_at_construction(run: Run) -> None:
    """Bug guarded: a reader's name with a slash acknowledged where nobody looks; a spec of another type, or a shift
    of 1.5, failed or masked every sample only when the first batch was there."""
    for reader in ("a/b", "../x", "", "x" * 300, "a\0b"):
        with pytest.raises(ValueError, match="reader"):
            loader(run, reader=reader)
    with pytest.raises(TypeError, match="FieldSpec"):
        loader(run, fields={EXPERTS: "token"})
    for wrong in ({"start": "1"}, {"multiple": 1.0}, {"seq_len": "64"}):
        with pytest.raises(TypeError, match="not an integer"):
            loader(run, **wrong)
    with pytest.raises(ValueError, match="start is 0"):
        loader(run, start=0)
    with pytest.raises(TypeError, match="shift"):
        FieldSpec(shift=1.5)


def test_a_component_with_a_name_that_is_no_text_is_refused(run: Run) -> None:
    """Bug guarded: such a file was left out of the manifest, and its damage never found."""
    manager = CheckpointManager(run_dir=run.root)
    directory = manager.new_component_dir()
    with open(os.fsencode(directory) + b"/\xff", "w") as file:
        file.write("weights")
    with pytest.raises(OSError):
        manager.commit_component(1, "trainer", directory)
