"""Every environment variable that lakh reads is documented."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_our_variables_are_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "native" / "CMakeLists.txt"]
    used = {name for path in sources for name in re.findall(r"\bLAKH_[A-Z_0-9]+\b", path.read_text(encoding="utf-8"))}
    assert used >= {"LAKH_NATIVE", "LAKH_RENDEZVOUS"}
    assert not {name for name in used - {"LAKH_COMPLETE"} if f"`{name}" not in page}
