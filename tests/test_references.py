"""The bibliography: every entry is whole and cited, every key that is cited is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRIES = re.split(r"^(?=@)", (ROOT / "docs" / "references.bib").read_text(encoding="utf-8"), flags=re.M)[1:]
KEYS = [re.match(r"@\w+\{([\w-]+),", entry)[1] for entry in ENTRIES]
FOLDERS = ("src", "papers", "docs", "benchmarks")


def cited():
    files = (path for folder in FOLDERS for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return set(re.findall(r"\b([a-z]+(?:18|19|20)\d\d[a-z]\w+)\b", text))


def test_entries_are_whole():
    assert len(KEYS) == len(set(KEYS))
    for entry in ENTRIES:
        assert entry.count("{") == entry.count("}"), entry
        for field in ("author", "title", "year"):
            assert re.search(rf"\b{field}\s*=\s*\{{", entry), entry


def test_every_key_that_is_cited_is_there_and_no_other():
    assert cited() == set(KEYS)
