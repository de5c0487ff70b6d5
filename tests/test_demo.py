"""The demo's short form: real processes, one SIGKILL of all of them, one resume, every invariant judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo trains with PyTorch: pip install 'prime-io[torch]'")
pytest.importorskip("rich", reason="the demo shows its progress with rich: the extra dev has it")

ROOT = Path(__file__).parents[1]


@pytest.mark.demo
@pytest.mark.parametrize("pin", ["link", "skip"])
def test_the_short_demo_is_killed_and_resumes(pin: str, tmp_path: Path) -> None:
    """Main job: the short demo, killed once and resumed once, keeps every invariant and says so."""
    command = [sys.executable, "-m", "examples.async_rl", "--short", "--pin", pin, "--seed", "2"]
    done = subprocess.run(
        [*command, "--run", str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every invariant held" in done.stdout
    assert ("lost with their files" in done.stdout) == (pin == "skip")
