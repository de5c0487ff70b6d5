"""`PayloadLoader` on one rank: every byte, budgets, losses, acknowledgements."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loading import EXPERTS, FIELDS, PIXELS, TOPK, Run, arrays_of, check
from prime_io import CorruptPayloadError, Exchange, FieldSpec, PayloadStore, prepare_resume
from work import wait_until

torch = pytest.importorskip("torch", reason="the loader makes tensors: pip install 'prime-io[torch]'")

from prime_io import PayloadLoader, Ranks  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run(tmp_path / "run")
    yield made
    made.store.close()


def loader_of(run: Run, **options: Any) -> PayloadLoader:
    settings: dict[str, Any] = {"seq_len": 64, "start": 1, "ranks": Ranks.alone()}
    fields = options.pop("fields", FIELDS)
    return PayloadLoader(run.store, run.exchange, fields, **(settings | options))


def file_of(run: Run, batch: Any, trace: str, field: str = EXPERTS) -> Path:
    """The last file of a field of a trace."""
    [queued] = [t for t in batch.traces if t.trace_id == trace]
    return Path(run.store.root) / [s for s in queued.samples[0].payload if s.field == field][-1].file


def test_every_byte_of_every_step(run: Run) -> None:
    """Main job: every row of every field of every trace is what was written, and nothing else is valid."""
    made = run.batch(1, [10, 20, 5, 33, 7, 12, 1, 64], pixels=True, ragged=True)
    made |= run.batch(2, [3])
    made["fork"] = [arrays_of(77, 9), arrays_of(78, 30, ragged=True), arrays_of(79, 30, pixels=True)]
    run.publish(3, [run.trace("fork", made["fork"], parts=3)])
    run.exchange.say_stop(3)
    seen: dict[int, list[str]] = {}
    with loader_of(run, multiple=4) as loader:
        for step in loader:
            for mb in step:
                seen.setdefault(step.number, []).extend(check(mb, made))
                own = [made[s.trace_id][s.nth] for s in mb.samples]
                if PIXELS in mb.payload:
                    got = mb.payload[PIXELS]
                    want = [a.get(PIXELS, np.zeros((0, 4), np.float32)) for a in own]
                    np.testing.assert_array_equal(got.rows.numpy(), np.concatenate(want))
                    assert got.counts is not None and got.counts.tolist() == [len(w) for w in want]
                    assert got.valid.all()
                if TOPK in mb.payload:
                    got = mb.payload[TOPK]
                    counts = np.concatenate(
                        [a.get(f"{TOPK}.counts", np.zeros(len(a["mask"]), np.int32)) for a in own]
                    )
                    values = [a[f"{TOPK}.values"] for a in own if f"{TOPK}.values" in a]
                    assert got.counts is not None
                    np.testing.assert_array_equal(got.counts.numpy()[: len(counts)], counts)
                    np.testing.assert_array_equal(
                        got.rows.numpy(), np.concatenate([np.zeros((0, 2), np.uint16), *values])
                    )
                    assert not got.counts[len(counts) :].any() and not got.valid[len(counts) :].any()
            loader.done(step.number)
        stats = loader.stats()
    assert sorted(seen[1]) == sorted(f"t1.{i}" for i in range(8))
    assert (seen[2], seen[3]) == (["t2.0"], ["fork"] * 3)
    assert (stats.steps, stats.samples, stats.masked_samples) == (3, 12, 0)
    assert stats.nbytes > sum(a[EXPERTS].nbytes for samples in made.values() for a in samples)
    assert run.exchange.trained(["trainer"]) == 3


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_windows_are_slices_of_the_whole(run: Run, size: int) -> None:
    """A context-parallel rank's tensors are rows [lo, hi) of those of a rank that has all, ragged ones too."""
    run.batch(1, [10, 20, 5, 33, 7, 12], pixels=True, ragged=True)
    options = {"multiple": 8, "columns": {"mask": FieldSpec(shift=1)}}
    with loader_of(run, **options) as loader:
        whole = list(next(iter(loader)))
    for rank in range(size):
        with loader_of(run, ranks=Ranks.alone(cp=(rank, size)), **options) as loader:
            windows = list(next(iter(loader)))
        assert len(windows) == len(whole)
        for mb, all_of in zip(windows, whole, strict=True):
            lo, hi = mb.lo, mb.hi
            assert (lo, hi) == (mb.length * rank // size, mb.length * (rank + 1) // size)
            for name in ("token_ids", "mask", "logprobs", "advantages", "position_ids"):
                assert torch.equal(getattr(mb, name), getattr(all_of, name)[lo:hi]), name
            assert torch.equal(mb.cu_seqlens, all_of.cu_seqlens)
            for part in (0, 1):
                assert torch.equal(mb.payload[EXPERTS][part], all_of.payload[EXPERTS][part][lo:hi])
                assert torch.equal(mb.payload[PIXELS][part], all_of.payload[PIXELS][part])
            mine, theirs = mb.payload[TOPK], all_of.payload[TOPK]
            assert torch.equal(mine.counts, theirs.counts[lo:hi])
            first, end = int(theirs.counts[:lo].sum()), int(theirs.counts[:hi].sum())
            assert torch.equal(mine.rows, theirs.rows[first:end])


def test_label_aligned_columns_stay_within_their_sample(run: Run) -> None:
    """shift=1 reads the next token's value; the last row of a sample is fill, never the next sample's first."""
    made = run.batch(1, [4, 3])
    names = ("token_ids", "mask", "logprobs", "advantages")
    with loader_of(run, columns=dict.fromkeys(names, FieldSpec(shift=1))) as loader:
        [mb] = next(iter(loader))
    for name in names:
        want = np.zeros(7, made["t1.0"][0][name].dtype)
        want[0:3], want[4:6] = made["t1.0"][0][name][1:], made["t1.1"][0][name][1:]
        np.testing.assert_array_equal(getattr(mb, name).numpy(), want)


def test_one_advantage_for_all_tokens(run: Run) -> None:
    """A scorer's single number reaches every token of its sample, and no padding."""
    arrays = arrays_of(1, 5)
    arrays["advantages"] = 0.5  # type: ignore[assignment]
    run.publish(1, [run.trace("a", [arrays]), run.trace("b", [arrays_of(2, 2)])])
    with loader_of(run, multiple=16) as loader:
        [mb] = next(iter(loader))
    assert mb.advantages[:5].tolist() == [0.5] * 5
    np.testing.assert_array_equal(mb.advantages[5:].numpy(), [*arrays_of(2, 2)["advantages"], *[0] * 9])


def test_dtypes_widen_and_layouts_are_the_steps(run: Run) -> None:
    """Every micro-batch of a step has the same dtype and row shape, also one none of whose samples is wide."""
    narrow, wide = arrays_of(3, 8), arrays_of(4, 8)
    wide[EXPERTS] = np.full((7, 3, 2), 300, np.uint16)
    run.publish(1, [run.trace("narrow", [narrow]), run.trace("wide", [wide])])
    with loader_of(run, seq_len=8) as loader:
        dtypes = {mb.samples[0].trace_id: mb.payload[EXPERTS].rows.dtype for mb in next(iter(loader))}
    assert dtypes == {"narrow": torch.uint16, "wide": torch.uint16}
    with loader_of(run, seq_len=8, fields={EXPERTS: FieldSpec(align="token-1", dtype="int32")}) as loader:
        for mb in next(iter(loader)):
            rows = mb.payload[EXPERTS].rows
            assert rows.dtype == torch.int32
            if mb.samples[0].trace_id == "wide":
                assert (rows[:7] == 300).all()
    with loader_of(run, fields={EXPERTS: FieldSpec(align="token-1", dtype="uint8")}) as loader:
        with pytest.raises(ValueError, match="does not fit into uint8"):
            next(iter(loader))


# -- reading ahead


def test_what_is_read_ahead_stays_within_the_budget(run: Run) -> None:
    """A slow consumer does not fill the memory: bytes read and not handed out never exceed the budget."""
    made = run.batch(1, [60] * 12)
    with loader_of(run, lookahead=100, budget_bytes=5000) as loader:
        step = next(iter(loader))
        for mb in step:
            check(mb, made)
            threading.Event().wait(0.02)
        assert len(step) == 12 and 2000 < loader.stats().peak_bytes <= 5000


def test_a_micro_batch_larger_than_the_budget_is_served_alone(run: Run) -> None:
    """A budget that is too small slows the loader down; it does not stop it."""
    made = run.batch(1, [60] * 4)
    with loader_of(run, budget_bytes=1) as loader:
        one = [check(mb, made) for mb in next(iter(loader))]
        peak = loader.stats().peak_bytes
    with loader_of(run, lookahead=1) as loader:
        assert one == [check(mb, made) for mb in next(iter(loader))]
        assert loader.stats().peak_bytes == peak


def test_tensors_on_the_cpu_are_never_written_again(run: Run) -> None:
    """Memory is reused only when no tensor views it any more: what a trainer keeps stays what it was."""
    wide = {"x": FieldSpec()}
    made, kept = {}, []
    for step in range(1, 7):
        rows = np.random.default_rng(step).integers(0, 256, (64, 8192), np.uint8)
        arrays = arrays_of(step, 64)
        trace = run.trace(f"t{step}", [arrays])
        segments = run.store.write({"x": rows}, version=0)
        trace.samples[0].payload.extend(segments.values())
        run.publish(step, [trace])
        made[step] = rows
    run.exchange.say_stop(6)
    with loader_of(run, fields=wide) as loader:
        for step in loader:
            [mb] = step
            if step.number % 2:
                kept.append((step.number, mb.payload["x"].rows[8:].clone(), mb.payload["x"].rows[8:]))
            loader.done(step.number)
    for number, copy, view in kept:
        assert torch.equal(copy, view)
        np.testing.assert_array_equal(view.numpy(), made[number][8:])


def test_reading_ahead_crosses_steps(run: Run) -> None:
    """The first micro-batch of a step is in memory before the step begins, if its batch was there."""
    made = run.batch(1, [60] * 4) | run.batch(2, [60] * 2)
    with loader_of(run, lookahead=3) as loader:
        steps = iter(loader)
        step = next(steps)
        for mb in step:
            check(mb, made)
            upcoming = loader._batches._upcoming
            assert upcoming is not None and upcoming.batch.step == 2
            upcoming.looked.wait()
        loader.done(1)
        wait_until(lambda: len(loader._reads._done) == 2)
        for version in Path(run.store.root).glob("v*"):
            for file in version.iterdir():
                file.unlink()
        step = next(steps)
        assert [name for mb in step for name in check(mb, made)] == ["t2.0", "t2.1"] and not step.masked


def test_closing_ends_the_thread(run: Run) -> None:
    """Nothing of a loader outlives its `with`, whether it ends well, early, or was never iterated."""
    before = threading.active_count()
    run.batch(1, [60] * 9)
    with loader_of(run) as loader:
        next(iter(next(iter(loader))))
    assert threading.active_count() == before
    with loader_of(run):
        pass
    with pytest.raises(KeyError), loader_of(run) as loader:
        next(iter(loader))
        raise KeyError
    wait_until(lambda: threading.active_count() == before)
    with pytest.raises(ValueError, match="closed"):
        next(iter(loader))


# -- what is lost


@pytest.mark.parametrize("how", ["deleted", "truncated", "a directory"])
def test_lost_samples_are_masked_and_listed(run: Run, how: str, caplog: Any) -> None:
    """A file that is gone or short before the step costs that sample alone: masked, counted, logged by trace."""
    made = run.batch(1, [20, 20, 20, 20])
    batch = run.exchange.read_batch(1)
    file = file_of(run, batch, "t1.2")
    if how == "truncated":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 1)
    else:
        file.unlink()
        if how == "a directory":
            file.mkdir()
    with caplog.at_level(logging.WARNING, "prime_io"), loader_of(run) as loader:
        step = next(iter(loader))
        assert step.masked == ("t1.2",)
        masked = []
        for mb in step:
            check(mb, made)
            for s in mb.samples:
                own = slice(s.start, s.start + s.n_tokens)
                assert bool(mb.mask[own].any()) != s.masked
                assert bool(mb.payload[EXPERTS].valid[own].any()) != s.masked
                masked += [s.trace_id] * s.masked
        assert masked == ["t1.2"] and loader.stats().masked_samples == 1
    assert "1 of 4 samples masked" in caplog.text and "trace t1.2, field 'routed_experts'" in caplog.text
    assert file.name in caplog.text


def test_a_lost_spill_masks_its_sample(run: Run) -> None:
    """Columns are read as payload is: without its token ids a sample cannot be trained."""
    made = run.batch(1, [20, 20])
    batch = run.exchange.read_batch(1)
    assert batch is not None
    (Path(run.store.root) / batch.traces[0].samples[0].columns["token_ids"].file).unlink()
    with loader_of(run) as loader:
        step = next(iter(loader))
        assert step.masked == ("t1.0",)
        for mb in step:
            check(mb, made)


def test_a_lost_optional_field_costs_only_the_field(run: Run) -> None:
    """A field that is not required is left out of its sample; its rows keep their places, not valid."""
    made = run.batch(1, [20, 20], pixels=True)
    batch = run.exchange.read_batch(1)
    file_of(run, batch, "t1.0", PIXELS).unlink()
    with loader_of(run) as loader:
        step = next(iter(loader))
        [mb] = step
        check(mb, made)
        assert not step.masked and mb.mask.any()
        pixels = mb.payload[PIXELS]
        assert pixels.counts is not None
        counts = pixels.counts.tolist()
        assert counts == [len(made[s.trace_id][0][PIXELS]) for s in mb.samples]
        lost = slice(0, counts[0]) if mb.samples[0].trace_id == "t1.0" else slice(counts[0], None)
        assert not pixels.valid[lost].any() and int(pixels.valid.sum()) == len(made["t1.1"][0][PIXELS])


def test_a_step_all_of_which_is_lost(run: Run) -> None:
    """A batch without a file left is a step of zero loss, not a crash."""
    run.batch(1, [20, 20], pixels=True, ragged=True)
    for file in Path(run.store.root).glob("v0/*"):
        file.unlink()
    with loader_of(run) as loader:
        step = next(iter(loader))
        for mb in step:
            assert not mb.mask.any() and not mb.payload[EXPERTS].valid.any()
        loader.done(1)
        assert step.masked == ("t1.0", "t1.1")


def test_missing_can_be_an_error(run: Run) -> None:
    """on_missing="raise" names trace, field and file, as the exception that fits."""
    run.batch(1, [20, 20])
    batch = run.exchange.read_batch(1)
    file = file_of(run, batch, "t1.1")
    with file.open("r+b") as opened:
        opened.truncate(4100)
    with loader_of(run, on_missing="raise") as loader:
        with pytest.raises(CorruptPayloadError, match=rf"step 1, trace t1.1, field '{EXPERTS}'.*{file.name}"):
            next(iter(loader))
        with pytest.raises(RuntimeError, match="cannot go on"):
            next(iter(loader))
    file.unlink()
    with loader_of(run, on_missing="raise") as loader:
        with pytest.raises(FileNotFoundError, match=r"trace t1\.1") as caught:
            next(iter(loader))
        assert caught.value.filename.endswith(file.name)


@pytest.mark.parametrize("cp", [(0, 1), (1, 2)])
def test_a_swap_with_a_file_of_equal_size_is_found(run: Run, cp: tuple[int, int]) -> None:
    """Another trace's bytes are never trained, also where only a part of them is read."""
    run.batch(1, [21, 21])
    batch = run.exchange.read_batch(1)
    one, two = file_of(run, batch, "t1.0"), file_of(run, batch, "t1.1")
    assert one.stat().st_size == two.stat().st_size
    two.write_bytes(one.read_bytes())
    with loader_of(run, ranks=Ranks.alone(cp=cp), multiple=2) as loader:
        with pytest.raises(CorruptPayloadError, match=rf"micro-batch 0.*trace t1.1, field '{EXPERTS}'"):
            list(next(iter(loader)))


def test_a_flipped_bit_is_found(run: Run) -> None:
    """Bytes that differ from what was written are an error, unless verifying is turned off."""
    run.batch(1, [21])
    file = file_of(run, run.exchange.read_batch(1), "t1.0")
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    with loader_of(run) as loader, pytest.raises(CorruptPayloadError, match=file.name):
        list(next(iter(loader)))
    with loader_of(run, verify=False) as loader:
        assert len(list(next(iter(loader)))) == 1


def test_a_file_lost_during_the_step_is_an_error(run: Run) -> None:
    """After the probe nothing is masked any more, since other micro-batches are trained already: it raises."""
    run.batch(1, [60, 59, 58])
    file = file_of(run, run.exchange.read_batch(1), "t1.2")
    with loader_of(run, lookahead=1) as loader:
        step = next(iter(loader))
        micro_batches = iter(step)
        next(micro_batches)
        file.unlink()
        next(micro_batches)
        with pytest.raises(
            FileNotFoundError, match=f"step 1, micro-batch 2, rank 0: trace t1.2, field '{EXPERTS}'"
        ):
            next(micro_batches)
        with pytest.raises(RuntimeError, match="cannot go on"):
            next(iter(step))


def test_a_trace_with_wrong_rows_is_an_error(run: Run) -> None:
    """n - 2 rows are no token-1 field: an error before anything is read, naming the trace."""
    arrays = arrays_of(1, 9)
    arrays[EXPERTS] = arrays[EXPERTS][:-1]
    run.publish(1, [run.trace("odd", [arrays])])
    with loader_of(run) as loader, pytest.raises(ValueError, match="trace odd, sample 0"):
        next(iter(loader))


def test_too_long_a_sample_is_an_error(run: Run) -> None:
    """A sample that fits into no sequence is not cut in silence."""
    run.batch(1, [65])
    with loader_of(run) as loader, pytest.raises(ValueError, match=r"trace t1.0.*65 tokens.*seq_len 64"):
        next(iter(loader))


# -- steps


def test_done_is_asked_for_and_acknowledges(run: Run) -> None:
    """A step counts as trained only when the trainer says so, and it cannot forget to."""
    run.batch(1, [60, 60])
    run.batch(2, [3])
    with loader_of(run) as loader:
        steps = iter(loader)
        step = next(steps)
        with pytest.raises(ValueError, match="2 micro-batches are left"):
            loader.done(1)
        for _ in step:
            pass
        with pytest.raises(RuntimeError, match="step 1 is not done"):
            next(loader.__iter__())
        assert run.exchange.trained(["trainer"]) is None
        with pytest.raises(ValueError, match="step 2 is not open"):
            loader.done(2)
        loader.done(1)
        assert run.exchange.trained(["trainer"]) == 1
        with pytest.raises(ValueError, match="step 1 is not open"):
            loader.done(1)
        assert next(iter(loader)).number == 2
    files = {s.file for t in run.exchange.read_batch(1).traces for s in t.segments()}
    assert run.store.probe(sorted(files)).present.all(), "the loader deletes nothing"


def test_readers_acknowledge_apart(run: Run) -> None:
    """Actor and critic each release a batch: it is trained when both are done."""
    run.batch(1, [3])
    for reader in ("actor", "critic"):
        assert run.exchange.trained(["actor", "critic"]) is None
        with loader_of(run, reader=reader) as loader:
            for _ in next(iter(loader)):
                pass
            loader.done(1)
    assert run.exchange.trained(["actor", "critic"]) == 1


def test_state_is_the_step(run: Run) -> None:
    """A resumed trainer goes on at the batch that it says, also one that comes later."""
    made = run.batch(4, [5])
    with loader_of(run, start=4) as loader:
        steps = iter(loader)
        step = next(steps)
        assert step.number == 4
        for mb in step:
            check(mb, made)
        loader.done(4)
        late = threading.Timer(0.3, lambda: run.batch(5, [6]))
        late.start()
        step = next(steps)
        late.join()
        assert step.number == 5 and list(step)
        loader.done(5)
        run.exchange.say_stop(5)
        assert next(steps, None) is None


def test_batches_of_another_life_are_never_read(tmp_path: Path) -> None:
    """A batch of a dead lineage is not there, wherever it lies."""
    dead = Run(tmp_path / "run")
    dead.batch(1, [5])
    dead.store.close()
    prepare_resume(tmp_path / "run", None)
    alive = Run(tmp_path / "run")
    made = alive.batch(1, [6])
    with loader_of(alive) as loader:
        for mb in next(iter(loader)):
            assert check(mb, made) == ["t1.0"] and mb.length == 6
    alive.publish(2, [], lineage=alive.lineage.id)
    # A straggler of the dead life puts its batch in our place.
    theirs = (dead.lineage.directory.parent.parent / "abandoned").rglob("step_1")
    (alive.lineage.batches_dir / "step_1").write_bytes(next(theirs).read_bytes())
    with loader_of(alive) as loader, pytest.raises(ValueError, match=r"holds batch 1 of lineage"):
        next(iter(loader))
    alive.store.close()


def test_an_empty_batch_is_a_step(run: Run) -> None:
    """Ranks stay in step also where a batch has nothing for them: they get a dummy without loss."""
    run.publish(1, [])
    with loader_of(run, multiple=8) as loader:
        [mb] = next(iter(loader))
        assert mb.length == 8 and not mb.samples and not mb.mask.any() and not mb.payload
        loader.done(1)


def test_arguments_are_checked(run: Run) -> None:
    """What cannot work is said at construction, with what to do."""
    for options, match in [
        ({"seq_len": 63, "multiple": 2}, "multiple"),
        ({"lookahead": 0}, "lookahead"),
        ({"on_missing": "skip"}, "on_missing"),
        ({"fields": {"mask": FieldSpec()}}, "give their specs as columns"),
        ({"columns": {"mask": FieldSpec(fill=1)}}, "fill of mask"),
        ({"columns": {"x": FieldSpec(align="free")}}, "one row per token"),
        ({"ranks": Ranks.alone(cp=(0, 2)), "multiple": 3, "seq_len": 63}, "cp size 2"),
        ({"device": "meta"}, "cpu and cuda"),
    ]:
        with pytest.raises(ValueError, match=match):
            loader_of(run, **options)


def test_the_rest_works_without_torch() -> None:
    """Orchestrator and workers import prime_io without PyTorch; the loader says what is missing."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import prime_io\n"
        "from prime_io import *\n"
        "try: prime_io.PayloadLoader\n"
        "except ImportError as error: print(error)\n"
        "try: prime_io.no_such_name\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PayloadLoader needs PyTorch" in done.stdout and "no_such_name" in done.stdout


def test_the_exchange_is_not_shared_with_another_run(run: Run, tmp_path: Path) -> None:
    """A batch whose files are in another store is masked whole, not read from a namesake."""
    run.batch(1, [5])
    with (
        PayloadStore(tmp_path / "other", owner=True) as other,
        PayloadLoader(
            other, Exchange(run.lineage), FIELDS, seq_len=8, start=1, ranks=Ranks.alone()
        ) as loader,
    ):
        assert next(iter(loader)).masked == ("t1.0",)


def test_a_program_that_forgets_to_close_ends(run: Run) -> None:
    """The background thread does not keep a finished program alive, nor does an error in it."""
    run.batch(1, [60] * 9)
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from prime_io import Exchange, Lineage, PayloadLoader, PayloadStore\n"
        "root = Path(sys.argv[1])\n"
        "loader = PayloadLoader(PayloadStore(root / 'payloads', create=False), Exchange(Lineage.load(root)), {},\n"
        "                       seq_len=64, start=1, lookahead=2)\n"
        "print(next(iter(next(iter(loader)))).length)\n"
        "raise SystemExit(7)\n"
    )
    command = [sys.executable, "-c", code, str(run.root), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "60\n"), done.stderr


def test_what_the_probe_cannot_tell_is_an_error(run: Run) -> None:
    """A link in a file's place is nothing that a worker wrote: an error that names the trace, not a lost sample."""
    run.batch(1, [20])
    file = file_of(run, run.exchange.read_batch(1), "t1.0")
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved").name)
    with loader_of(run) as loader:
        with pytest.raises(OSError, match=rf"step 1, rank 0: trace t1\.0, field '{EXPERTS}'") as caught:
            next(iter(loader))
        assert caught.value.errno == errno.ELOOP
