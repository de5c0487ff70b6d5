"""What every benchmark shares: a place on a real disk, the rows it makes, the machine it ran on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Generator, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from rows import CPUS, Rows, in_words, mount_of

DISK = Path(__file__).parents[1] / "target" / "bench-data"
PEERS = "numpy torch safetensors tensorstore obstore fastsafetensors runai-model-streamer aiofiles aiofile".split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="small sizes; a row below its floor fails")


@pytest.fixture
def rows(
    request: pytest.FixtureRequest, benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> Iterator[Rows]:
    made = Rows(benchmark, short=request.config.getoption("--short"))
    yield made
    made.finish()
    with capsys.disabled():
        if made.title:
            print(f"\n{made.title}: {made.rounds} rounds")
        for line in made.contest_table:
            best, middle = in_words(line["best_s"]), in_words(line["median_s"])
            print(f"  {line['name']:48s} best {best:>8s}  median {middle:>8s}  {line['rate'] or ''}")
        for why in made.skipped:
            print(f"  {why}")
        for row in made.found:
            verdict = "PASS" if row["passed"] else "BELOW"
            print(
                f"  {verdict:5s} {row['key']:20s} {row['ours']} against {row['rival']}: {row['ratio']:.2f} "
                f"(medians {row['ratio_of_medians']:.2f}, floor {row['floor']:.2f}) {row['note']}"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """In the short form, a row below its floor fails its benchmark."""
    yield
    made = getattr(item, "funcargs", {}).get("rows")
    if made is not None and made.short:
        below = [
            f"{row['key']} {row['ratio']:.2f} < {row['floor']:.2f}" for row in made.found if not row["passed"]
        ]
        if below:
            pytest.fail(f"below the floor: {', '.join(below)}", pytrace=False)


@pytest.fixture(scope="module")
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the module's own under target/, on the disk of the checkout, removed with all in it."""
    where = DISK / request.module.__name__
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    yield where
    shutil.rmtree(where)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What a reader must know to compare."""
    DISK.mkdir(parents=True, exist_ok=True)
    kind, options = mount_of(DISK)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    machine_info.clear()
    machine_info.update(
        cpus=f"{CPUS} x {cpu[0].partition(': ')[2] if cpu else platform.processor()}",
        memory=f"{memory:.0f} GiB",
        kernel=platform.release(),
        files=f"{kind} ({options})",
        huge_pages=pages[pages.index("[") + 1 : pages.index("]")],
        python=platform.python_version(),
        packages=", ".join(_version(name) for name in PEERS),
        fio=_output(["fio", "--version"]),
    )


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} not installed"


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
