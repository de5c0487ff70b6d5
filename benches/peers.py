"""How others read and write the same tensors, each as its own documentation says. Absent packages are skipped.

All read the same payload files (they are valid safetensors), unless a peer has a format of its own; then it wrote
them itself. A reader gives one array per trace. Lazy maps are touched once per page, without which nothing is read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from duel import Entry

PAGE = os.sysconf("SC_PAGESIZE")


class Tensors(NamedTuple):
    """Arrays of one shape and dtype, each as tensor `names[i]` at `offsets[i]` of safetensors file `paths[i]`."""

    arrays: list[np.ndarray]
    names: list[str]
    paths: list[str]
    offsets: list[int]

    def check(self, read: Sequence[Any]) -> None:
        """Every byte of every array."""
        assert len(read) == len(self.arrays)
        for mine, theirs in zip(self.arrays, read, strict=True):
            theirs = theirs.numpy() if hasattr(theirs, "numpy") else theirs
            assert np.array_equal(mine.reshape(-1), np.asarray(theirs).reshape(-1))


Skip = Callable[[str], None]
Peer = Callable[[Tensors, Path], Entry]


def readers(tensors: Tensors, own: Path, skip: Skip) -> Iterator[Entry]:
    """A contestant per peer; `own` is a directory for their own formats."""
    yield from _make(READERS, tensors, own, skip)


def writers(tensors: Tensors, own: Path, skip: Skip, *, only: Sequence[str] | None = None) -> Iterator[Entry]:
    """The same for publishing: every array in a file of its own, nothing synced, files removed after a round."""
    peers = [peer for peer in WRITERS if only is None or peer[0] in only]
    yield from _make(peers, tensors, own, skip)


def _make(peers: Sequence[tuple[str, Peer]], tensors: Tensors, own: Path, skip: Skip) -> Iterator[Entry]:
    for package, make in peers:
        if find_spec(package) is None:
            skip(f"{package} is not installed: {make.__name__} is left out")
        else:
            yield make(tensors, own)


def _entry(name: str, run: Callable[[], Any], tensors: Tensors) -> Entry:
    return Entry(name=name, run=run, check=tensors.check)


def _touch(array: Any) -> int:
    """A byte of each page."""
    return int(np.asarray(array).reshape(-1).view(np.uint8)[::PAGE].sum())


# --- readers


def numpy_fromfile(t: Tensors, own: Path) -> Entry:
    n, dtype = t.arrays[0].size, t.arrays[0].dtype

    def run() -> list[Any]:
        return [
            np.fromfile(path, dtype, n, offset=offset)
            for path, offset in zip(t.paths, t.offsets, strict=True)
        ]

    return _entry("np.fromfile", run, t)


def numpy_memmap(t: Tensors, own: Path) -> Entry:
    shape, dtype = t.arrays[0].shape, t.arrays[0].dtype

    def run() -> list[Any]:
        maps = [
            np.memmap(path, dtype, "r", offset, shape)
            for path, offset in zip(t.paths, t.offsets, strict=True)
        ]
        for array in maps:
            _touch(array)
        return maps

    return _entry("np.memmap, touched (no copy is made)", run, t)


def safetensors_get_tensor(t: Tensors, own: Path) -> Entry:
    from safetensors import safe_open

    def run() -> list[Any]:
        arrays = []
        for name, path in zip(t.names, t.paths, strict=True):
            with safe_open(path, framework="numpy") as opened:
                arrays.append(opened.get_tensor(name))
        return arrays

    return _entry("safetensors safe_open, get_tensor", run, t)


def safetensors_load_file(t: Tensors, own: Path) -> Entry:
    from safetensors.numpy import load_file

    def run() -> list[Any]:
        return [load_file(path)[name] for name, path in zip(t.names, t.paths, strict=True)]

    return _entry("safetensors.numpy.load_file", run, t)


def torch_load_mmap(t: Tensors, own: Path) -> Entry:
    import torch

    files = []
    for name, array in zip(t.names, t.arrays, strict=True):
        files.append(own / f"{name}.pt")
        torch.save({name: torch.from_numpy(array)}, files[-1])

    def run() -> list[Any]:
        tensors = [torch.load(file, mmap=True)[name] for name, file in zip(t.names, files, strict=True)]
        for tensor in tensors:
            _touch(tensor)
        return tensors

    return _entry("torch.load(mmap=True), touched (no copy)", run, t)


def torch_from_file(t: Tensors, own: Path) -> Entry:
    import torch

    n = t.arrays[0].size

    def run() -> list[Any]:
        tensors = [
            torch.from_file(path, shared=False, size=offset + n, dtype=torch.uint8)[offset:]
            for path, offset in zip(t.paths, t.offsets, strict=True)
        ]
        for tensor in tensors:
            _touch(tensor)
        return tensors

    return _entry("torch.from_file, touched (no copy)", run, t)


def dcp_load(t: Tensors, own: Path) -> Entry:
    import torch
    import torch.distributed.checkpoint as dcp

    where = own / "dcp"
    dcp.save(dict(zip(t.names, map(torch.from_numpy, t.arrays), strict=True)), checkpoint_id=where)
    into = {
        name: torch.empty_like(torch.from_numpy(array)) for name, array in zip(t.names, t.arrays, strict=True)
    }

    def run() -> list[Any]:
        dcp.load(into, checkpoint_id=where)
        return list(into.values())

    return _entry("torch.distributed.checkpoint.load, reused", run, t)


def tensorstore_zarr(t: Tensors, own: Path) -> Entry:
    import tensorstore as ts

    rows = t.arrays[0].shape[0]
    specs = [
        {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{own}/{name}.zarr/"}} for name in t.names
    ]
    for spec, array in zip(specs, t.arrays, strict=True):
        metadata = {"compressor": None, "chunks": [rows // 8, *array.shape[1:]]}
        made = ts.open(
            {**spec, "metadata": metadata}, create=True, dtype=ts.uint8, shape=array.shape
        ).result()
        made.write(array).result()

    def run() -> list[Any]:
        opened = [future.result() for future in [ts.open(spec, read=True) for spec in specs]]
        return [future.result() for future in [array.read() for array in opened]]

    return _entry("tensorstore, zarr, 8 chunks, uncompressed", run, t)


def obstore_get_range(t: Tensors, own: Path) -> Entry:
    import obstore
    from obstore.store import LocalStore

    store = LocalStore(os.path.dirname(t.paths[0]))
    n = t.arrays[0].nbytes

    async def read() -> list[Any]:
        return await asyncio.gather(
            *(
                obstore.get_range_async(store, os.path.basename(path), start=offset, length=n)
                for path, offset in zip(t.paths, t.offsets, strict=True)
            )
        )

    def run() -> list[Any]:
        return [np.frombuffer(data, np.uint8) for data in asyncio.run(read())]

    return _entry("obstore LocalStore.get_range_async", run, t)


def fastsafetensors_nogds(t: Tensors, own: Path) -> Entry:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def run() -> list[Any]:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: t.paths})
        buffers = loader.copy_files_to_device()
        tensors = [buffers.get_tensor(name) for name in t.names]
        kept = _Kept(tensors, lambda: (buffers.close(), loader.close()))
        return kept

    return _entry("fastsafetensors, nogds, cpu", run, t)


class _Kept(list[Any]):
    """Tensors whose loader must live as long, and be closed after."""

    def __init__(self, tensors: list[Any], close: Callable[[], object]) -> None:
        super().__init__(tensors)
        self._close = close

    def __del__(self) -> None:
        self.clear()
        self._close()


def runai_streamer(t: Tensors, own: Path) -> Entry:
    from runai_model_streamer import SafetensorsStreamer

    def run() -> list[Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(t.paths)
            found = {name: tensor for _, name, tensor in _triples(streamer.get_tensors())}
        return [found[name] for name in t.names]

    return _entry("runai-model-streamer, 16 threads", run, t)


def _triples(tensors: Any) -> Iterator[tuple[str, str, Any]]:
    for item in tensors:
        yield item if len(item) == 3 else ("", *item)


def aiofiles_read(t: Tensors, own: Path) -> Entry:
    import aiofiles

    n = t.arrays[0].nbytes

    async def one(path: str, offset: int) -> bytes:
        async with aiofiles.open(path, "rb") as file:
            await file.seek(offset)
            return await file.read(n)

    async def read() -> list[bytes]:
        return await asyncio.gather(*map(one, t.paths, t.offsets))

    return _entry("aiofiles", lambda: [np.frombuffer(d, np.uint8) for d in asyncio.run(read())], t)


def aiofile_read(t: Tensors, own: Path) -> Entry:
    from aiofile import AIOFile

    n = t.arrays[0].nbytes

    async def one(path: str, offset: int) -> bytes:
        async with AIOFile(path, "rb") as file:
            return await file.read_bytes(n, offset)

    async def read() -> list[bytes]:
        return await asyncio.gather(*map(one, t.paths, t.offsets))

    return _entry("aiofile", lambda: [np.frombuffer(d, np.uint8) for d in asyncio.run(read())], t)


READERS: list[tuple[str, Peer]] = [
    ("numpy", numpy_fromfile),
    ("numpy", numpy_memmap),
    ("safetensors", safetensors_get_tensor),
    ("safetensors", safetensors_load_file),
    ("torch", torch_load_mmap),
    ("torch", torch_from_file),
    ("torch", dcp_load),
    ("tensorstore", tensorstore_zarr),
    ("obstore", obstore_get_range),
    ("fastsafetensors", fastsafetensors_nogds),
    ("runai_model_streamer", runai_streamer),
    ("aiofiles", aiofiles_read),
    ("aiofile", aiofile_read),
]


# --- writers: `run` gives a function that reads everything back, for the check


def _writer(
    name: str, t: Tensors, write: Callable[[], Any], back: Callable[[], list[Any]], own: Path
) -> Entry:
    def clear() -> None:
        shutil.rmtree(own)
        own.mkdir()

    return Entry(
        name=name,
        run=write,
        check=lambda _: t.check(back()),
        before=lambda: own.mkdir(exist_ok=True),
        after=clear,
    )


def safetensors_save_file(t: Tensors, own: Path) -> Entry:
    from safetensors.numpy import load_file, save_file

    def write() -> None:
        for name, array in zip(t.names, t.arrays, strict=True):
            save_file({name: array}, own / name)

    return _writer(
        "safetensors.numpy.save_file",
        t,
        write,
        lambda: [load_file(own / name)[name] for name in t.names],
        own,
    )


def safetensors_threads(t: Tensors, own: Path) -> Entry:
    from safetensors.numpy import load_file, save_file

    def write() -> None:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda name, array: save_file({name: array}, own / name), t.names, t.arrays))

    return _writer(
        "safetensors.numpy.save_file, a thread per CPU",
        t,
        write,
        lambda: [load_file(own / name)[name] for name in t.names],
        own,
    )


def torch_save(t: Tensors, own: Path) -> Entry:
    import torch

    def write() -> None:
        for name, array in zip(t.names, t.arrays, strict=True):
            torch.save({name: torch.from_numpy(array)}, own / name)

    return _writer(
        "torch.save", t, write, lambda: [torch.load(own / name, mmap=True)[name] for name in t.names], own
    )


def dcp_save(t: Tensors, own: Path) -> Entry:
    import torch
    import torch.distributed.checkpoint as dcp

    state = dict(zip(t.names, map(torch.from_numpy, t.arrays), strict=True))

    def back() -> list[Any]:
        into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        dcp.load(into, checkpoint_id=own)
        return list(into.values())

    # sync_files defaults to an fsync per file; nobody here is durable.
    def write() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(own, sync_files=False, thread_count=2))

    return _writer("torch.distributed.checkpoint.save, 2 threads", t, write, back, own)


def obstore_put(t: Tensors, own: Path) -> Entry:
    import obstore
    from obstore.store import LocalStore

    store = LocalStore(own)

    async def put() -> None:
        await asyncio.gather(
            *(
                obstore.put_async(store, name, memoryview(array).cast("B"), use_multipart=False)
                for name, array in zip(t.names, t.arrays, strict=True)
            )
        )

    return _writer(
        "obstore put_async",
        t,
        lambda: asyncio.run(put()),
        lambda: [np.fromfile(own / name, np.uint8) for name in t.names],
        own,
    )


WRITERS: list[tuple[str, Peer]] = [
    ("safetensors", safetensors_save_file),
    ("safetensors", safetensors_threads),
    ("torch", torch_save),
    ("torch", dcp_save),
    ("obstore", obstore_put),
]
