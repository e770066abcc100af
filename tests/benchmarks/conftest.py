import sys
from pathlib import Path

# The scripts import each other by bare names, as `python benchmarks/wire.py` finds them.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
