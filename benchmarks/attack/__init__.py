"""Bad inputs and damaged files, tried on the whole of matlens: what is refused in words, and what is not."""

import sys
from pathlib import Path

# Some inputs are made by what only analyses use.
sys.path.append(str(Path(__file__).resolve().parents[2] / "analyses"))
