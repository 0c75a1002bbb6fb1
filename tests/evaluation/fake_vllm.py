"""An interpreter that runs no vLLM: it keeps the job that it is given, and replies as it was told to."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdraft.decoding import Generation
from specdraft.evaluation.served_counts import Counts

_SCRIPT = """#!{python}
import json, pathlib, shutil, sys
here = pathlib.Path({here!r})
isolated, worker, job, replies = sys.argv[1:]
assert isolated == "-I" and worker.endswith("served_worker.py")
shutil.copy(job, here / "job.json")
speculation = json.loads(pathlib.Path(job).read_text())["llm"]["speculative_config"]
if "model" in speculation:
    shutil.copytree(speculation["model"], here / "drafter", dirs_exist_ok=True)
print({says!r}, file=sys.stderr)
if {code}:
    sys.exit({code})
shutil.copy(here / "replies.json", replies)
"""


def fake_vllm(
    folder: Path, generations: Sequence[Generation], counts: Sequence[Counts], *, code: int = 0, says: str = ""
) -> Path:
    """The interpreter, in `folder`; `job.json` and the `drafter` that it got will lie beside it."""
    counters, sums = [named(Counts(per_position=(0,) * len(counts[0].per_position)))], Counts()
    for one in counts:
        sums += one
        counters.append(named(sums))
    replies = {"version": "0.0", "answers": [g.tokens for g in generations], "counters": counters}
    (folder / "replies.json").write_text(json.dumps(replies))
    python = folder / "python"
    python.write_text(_SCRIPT.format(python=sys.executable, here=str(folder), code=code, says=says))
    python.chmod(0o755)
    return python


def named(counts: Counts) -> dict[str, Any]:
    """As vLLM's counters, each by the end of its name."""
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted,
        "accepted_tokens_per_pos": list(counts.per_position),
    }
