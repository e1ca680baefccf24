"""From the command line to the plan file: how long it takes, what it holds, and how both grow with the model.

Every case is `paraplan plan` in a process of its own: import, capture on the meta device, the search with its bound,
the file. Sizes are Llama-3.1's (sequence 8,192), GPT-3's (2,048) and DeepSeek-V3's (4,096), bf16 and AdamW. `s` is on
the clock, `cpu_s` of all its processes, `rss_gib` the most that one of them held, `asked_s` what the time is held
against, of a machine of two cores that does nothing else.

The cases `layers` and `devices` double one size alone; the last row says with which power of it processor seconds grow,
between the smallest and the largest.

    python -m benchmarks.scale [--only 405B] [--json FILE [--resume]]
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import paraplan as pp
from benchmarks.table import Row, main
from paraplan.ir.plan_words import plan_words

COLUMNS = ("case", "s", "asked_s", "cpu_s", "rss_gib", "plan_mb", "step_s", "mfu", "gap", "what")
GIB = 2**20  # of the kilobytes that the kernel counts


def llama(layers: int, hidden: int, inner: int, heads: int, batch: int) -> list[str]:
    """The model and its batch as the command line takes them."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return ["hf:llama", *_settings(sizes), "--batch", str(batch), "--seq", "8192"]


def _settings(sizes: dict[str, int]) -> list[str]:
    return [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]


GPT3 = {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048, "vocab_size": 51200}
B8, B70, B405 = (32, 4096, 14336, 32), (80, 8192, 28672, 64), (126, 16384, 53248, 128)


def planned(options: Sequence[str], cluster: str, asked_s: float | None = None) -> Row:
    """`paraplan plan`, once.

    Args:
        options: model first, then what follows the cluster.
        cluster: as the command line writes it.
        asked_s: what the time is held against, where something is.
    """
    model, *others = options
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "paraplan", "plan", model, cluster, *others, "--precision", "bf16"]
        started = time.perf_counter()
        with (Path(folder) / "said").open("w+") as said:
            child = subprocess.Popen([*command, "-o", str(file)], stdout=said, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            took = time.perf_counter() - started
            said.seek(0)
            words = said.read()
        row: Row = {"s": took, "cpu_s": used.ru_utime + used.ru_stime, "rss_gib": used.ru_maxrss / GIB}
        if child.returncode:
            return row | {"what": words[-300:], "failures": [f"exit {child.returncode}"]}
        plan, size = pp.Plan.load(file).data, file.stat().st_size
    assert plan.prediction is not None
    found = {"step_s": plan.prediction.step_s, "mfu": plan.prediction.mfu, "plan_mb": size / 1e6}
    gap = None if plan.certificate is None else plan.certificate.gap
    return row | found | {"gap": gap, "what": plan_words(plan), "asked_s": asked_s}


CASES: dict[str, Callable[[], Row]] = {
    "8B, mesh (8, 8)": partial(planned, [*llama(*B8, 64), "--mesh", "8,8"], "8xH100:8", 8.0),
    "8B, 64 H100": partial(planned, llama(*B8, 64), "8xH100:8", 20.0),
    "8B, memory binds": partial(planned, llama(*B8, 128), "8xH100:4", 20.0),
    "8B, offload": partial(planned, [*llama(*B8, 8), "--offload", "host"], "4xA100-40", 60.0),
    "70B, 256 H100": partial(planned, llama(*B70, 256), "8xH100:32", 30.0),
    "GPT-3, 1,024 A100": partial(
        planned, ["hf:gpt2", *_settings(GPT3), "--batch", "1536", "--seq", "2048"], "8xA100-80:128", 30.0
    ),
    "405B, 16,384 H100": partial(planned, llama(*B405, 2048), "8xH100:2048", 60.0),
    "405B, 8,192 H100": partial(planned, llama(*B405, 2048), "8xH100:1024", 60.0),
    "DeepSeek-V3, 2,048 H100": partial(
        planned, ["hf:deepseek_v3", "--batch", "16384", "--seq", "4096", "--time-limit", "90"], "8xH100:256", 90.0
    ),
    **{f"layers {n}": partial(planned, llama(n, *B8[1:], 64), "8xH100:8") for n in (16, 32, 64, 128)},
    **{f"devices {8 * n}": partial(planned, llama(*B8, 8 * n), f"8xH100:{n}") for n in (4, 16, 64, 256)},
}


def summary(rows: Sequence[Row]) -> Row:
    """What is late, and how processor seconds grow."""
    late = [row["case"] for row in rows if row.get("asked_s") and row["s"] > row["asked_s"]]
    found: Row = {"late": late}
    said = [f"late: {', '.join(late) or 'none'}"]
    for of in ("layers", "devices"):
        sizes = sorted((int(row["case"].split()[1]), row["cpu_s"]) for row in rows if row["case"].startswith(of))
        if len(sizes) > 1:
            (least, first_s), *_, (most, last_s) = sizes
            found[of] = math.log(last_s / first_s) / math.log(most / least)
            said.append(f"seconds grow with {of} to the power {found[of]:.2f}")
    return found | {"what": "; ".join(said)}


if __name__ == "__main__":
    raise SystemExit(main("scale", CASES, COLUMNS, summary=summary))
