"""`python -m tests.fuzz --count 1000000`: random and mutated bytes for every decoder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hostile_bytes import main

if __name__ == "__main__":
    sys.exit(main())
