"""One process of a run that a launcher starts; it says which it is."""

import json
import os
import sys
from pathlib import Path

from killed_runs import train

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / f"process-{os.environ['RANK']}").write_text(str(os.getpid()))
    train(folder, json.loads(sys.argv[2]))
