"""README's Python examples run as they stand, one after the other, in a folder of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="README.md is only in the checkout")
def test_the_examples_run(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert len(examples) >= 2
    code = "\n".join(examples).replace("/run/kvstore/kvstore.sock", str(tmp_path / "kvstore.sock"))
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
