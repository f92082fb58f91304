"""Where things lie that tests read: the checkout, and real data sets beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
DOCS: Final = ROOT / "docs"
SUPPORT: Final = ROOT / "tests" / "support"
SHARED_DATA: Final = ROOT.parent / "shared" / "data"  # real data sets; a test that needs one skips where it is absent
SHARED_ENGINES: Final = ROOT.parent / "shared" / "engines"  # programs that take long to build; as above
