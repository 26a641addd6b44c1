"""Put the measured tables into benchmarks/README.md, from the records beside it.

iterand bench step --json > benchmarks/records/step-h200.json
python tools/tables.py
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from iterand.lab.benchmarks import table
from iterand.lab.report.formatting import machine

HERE = Path(__file__).parent
README = HERE / "README.md"
RECORDS = HERE / "records"
BEGIN, END = "<!-- begin: written by benchmarks/tables.py -->", "<!-- end -->"


def filled(page: str, records: Path) -> str:
    """The page with the tables of all records between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    paths = sorted(records.glob("*.json"))
    parts = [line for path in paths for line in _tables(path)] or ["No record yet.", ""]
    return "\n".join([before + BEGIN, "", *parts, END + after])


def _tables(path: Path) -> Iterator[str]:
    record = json.loads(path.read_text())
    environment = record["environment"]
    hardware = environment["hardware"]
    for name, result in record["benchmarks"].items():
        yield from (f"### {name}: {machine(environment)}", "")
        yield f"`{environment['command']}`, {hardware['cores']} cores of {hardware['cpu']},"
        yield f"torch {environment['torch']}, Triton {environment['triton']}, Python {environment['python']};"
        yield f"median (10th–90th percentile); [record](records/{path.name})."
        yield from ("", *_markdown(result["rows"]), "", *(f"- {note}" for note in result["notes"]), "")
    if record["targets"]:
        yield from (f"### targets: {machine(environment)}", "", *_markdown(record["targets"]), "")


def _markdown(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = table.columns(rows)
    yield _line(map(table.heading, columns))
    yield _line("---:" if any(table.is_number(row.get(column)) for row in rows) else "---" for column in columns)
    for row in rows:
        yield _line(table.cell(column, row.get(column)).replace("|", r"\|") for column in columns)


def _line(texts: Any) -> str:
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    README.write_text(filled(README.read_text(), RECORDS))
