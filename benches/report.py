"""Tables out of the JSON of a run: python report.py bench.json bench.md [--into docs/performance.md]

With --into, what is between the markers of that file is replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rows import in_words
from targets import TARGETS

BEGIN, END = "<!-- made by benches/report.py -->", "<!-- end -->"


def tables(run: dict[str, Any]) -> Iterator[str]:
    """The lines of the report."""
    found = [bench["extra_info"] for bench in run["benchmarks"] if "rows" in bench["extra_info"]]
    rows = {row["key"]: row for info in found for row in info["rows"]}
    machine = run["machine_info"]
    yield f"Made {run['datetime'][:16].replace('T', ' ')} UTC on {machine['cpus']}, {machine['memory']} of memory, "
    yield f"Linux {machine['kernel']}, {machine['files']}, huge pages {machine['huge_pages']}, Python "
    yield f"{machine['python']}, {machine['fio']}, {machine['packages']}."
    if any(info["short"] for info in found):
        yield "Short form: smaller sizes."
    yield ""
    yield from _table("work|against|ours|rival|machine's limit|ratio (medians)|floor|", _targets(rows))
    for info in found:
        if info["contest"]:
            stalled = f", {info['stalls']} stalls for huge pages" if info["stalls"] else ""
            yield from ("", f"**{info['title']}**: {info['rounds']} rounds, load {info['load']}{stalled}", "")
            yield from _table("contestant|best|median|rate|of ours", _contest(info["contest"]))
        for why in info["skipped"]:
            yield from ("", f"Left out: {why}")


def _targets(rows: dict[str, Any]) -> Iterator[Sequence[str]]:
    for key, target in TARGETS.items():
        row = rows.get(key)
        if row is None:
            yield (target.work, target.against, "", "", "", "not run", f"{target.floor:.2g}", "")
            continue
        note = f" ({row['note']})" if row["note"] else ""
        ratio = f"{row['ratio']:.2f} ({row['ratio_of_medians']:.2f})"
        verdict = "" if not row["floor"] else "held" if row["passed"] else "**below**"
        yield (
            target.work,
            target.against + note,
            row["ours"],
            row["rival"],
            row["limit"],
            ratio,
            f"{row['floor']:.2g}" if row["floor"] else "none",
            verdict,
        )


def _contest(contest: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    ours = next(line["best_s"] for line in contest if line["name"].startswith("prime_io"))
    for line in sorted(contest, key=lambda line: float(line["best_s"])):
        best, middle = in_words(line["best_s"]), in_words(line["median_s"])
        yield line["name"], best, middle, line["rate"] or "", f"{line['best_s'] / ours:.2f}"


def _table(head: str, lines: Iterator[Sequence[str]]) -> Iterator[str]:
    columns = head.split("|")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def main() -> None:
    """Write the report, and show its first table's verdicts."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("json", type=Path)
    arguments.add_argument("markdown", type=Path)
    arguments.add_argument("--into", type=Path)
    given = arguments.parse_args()
    text = "\n".join(tables(json.loads(given.json.read_text()))) + "\n"
    given.markdown.write_text(text)
    print(f"{given.markdown}: {text.count('| held |')} rows held, {text.count('| **below** |')} below")
    if given.into is not None:
        before, begin, rest = given.into.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"{given.into} has no {BEGIN} ... {END}")
        given.into.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
