"""Write the digests of all cases, or the texts behind them.

python -m tests.golden [--texts FOLDER] [--only PART]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.golden.cases import CASES, plan_of
from tests.golden.texts import digest, texts_of

KEPT = Path(__file__).parent / "digests.json"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--only", default="")
    told = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for case in CASES:
        if told.only not in case:
            continue
        began = time.process_time()
        texts = texts_of(plan_of(case))
        digests = {part: digest(text) for part, text in texts.items()}
        before = kept.get(case, {})
        differs = [part for part in {**before, **digests} if before.get(part) != digests.get(part)]
        said = f"; differs in {', '.join(differs)}" if before and differs else "" if before else "; new"
        sys.stdout.write(f"{case}: {time.process_time() - began:.1f} s{said}\n")
        sys.stdout.flush()
        kept[case] = digests
        if told.texts is not None:
            folder = told.texts / case.replace(" ", "_")
            folder.mkdir(parents=True, exist_ok=True)
            for part, text in texts.items():
                (folder / part).write_text(text)
    if told.texts is None:
        KEPT.write_text(json.dumps({case: kept[case] for case in CASES if case in kept}, indent=0) + "\n")


if __name__ == "__main__":
    main()
