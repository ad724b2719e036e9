import sys
from pathlib import Path

# `theory_strategies`, which these tests share.
sys.path.append(str(Path(__file__).parent))
