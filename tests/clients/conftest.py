"""Real clients: the rigs of other folders are used here too."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("origin", "system"):
    _path = str(Path(__file__).resolve().parents[1] / _folder)
    if _path not in sys.path:
        sys.path.append(_path)
