"""``python -m orchestrator``: the same as the console script ``limen``."""

import sys
from pathlib import Path

# With -m Python puts the working directory first on the path, where the user's own `configs` or `rewards` would take the place of
# ours. The console script has no such entry.
if not sys.flags.safe_path and Path.cwd() != Path(__file__).resolve().parent.parent:
    sys.path.pop(0)

from orchestrator.main import main

sys.exit(main())
