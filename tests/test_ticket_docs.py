import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tickets.md"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert names["layer"].header.kept == 6554
    assert (tmp_path / "mine.ticket").stat().st_size < 64 * 256 * 4 / 8
