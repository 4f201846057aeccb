"""The examples of docs/marginals.md run."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "marginals.md"


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["plan"].certificate.exact
    assert names["moments"].reliable(1)
