"""Published rows in the planner's terms: what a source states is pinned, what it leaves out is listed as free.

In: JSON files of rows (device, sequence, model, degrees, what was measured). Out: a `Case` per row: model, cluster,
pins, and the alternatives a user of that system would try, of which the fastest that fits counts.

What follows from a source's text rather than from its rows' fields stands here: GPT rows are of Megatron-LM's model
(`megatron_gpt`); a pipeline whose microbatches are not stated runs those of one sample, as all rows do that state them
(Table 2 of Narayanan et al. 2021, Korthikanti et al. 2022, Llama 3); the layers of a GPT pipeline are cut evenly, the
embedding with the first stage and the head with the last (Megatron-LM); the rows of Narayanan et al. 2021 have
unsharded optimizers, and those that state their microbatch (their Table 2, whose ratio is that of the non-interleaved
bubbles) are plain 1F1B, as is MT-NLG (Smith et al. 2022, section 3), and neither had sequence parallelism, which came
later (Korthikanti et al. 2022), nor FlashAttention (Dao et al. 2022) or overlapped tensor parallelism; ZeRO-3 is
DeepSpeed's of 2021 (`ZERO3_PART_S`), where what does not fit may wait on the host; products add up gradients of weights
in Megatron-LM since 2022 (`gradient_accumulation_fusion`, by an author of Korthikanti et al.), and elsewhere additions
do; it sums gradients of bfloat16 models in float32 (`accumulate_allreduce_grads_in_fp32`, its arguments.py);
both deal a causal sequence out so that ranks have alike work (torch's `context_parallel`; Llama Team 2024, 3.3.2);
Llama 3 recomputed nothing that its authors count (Llama Team 2024, 3.3.2: "without activation checkpointing"), so what
is tried is that, and kernels that are made again in passing (`cheap`);
norms and sums over rows are of the library that a row's software takes (`_kernels`): torchtitan's are torch's, or the
compiler's, and so are Llama 3's, which does not say;
torchtitan runs a local batch as one microbatch or, in a pipeline, where it is not told, as many as that has ranks, with
two stages a rank where a schedule takes several (`build_pipeline_schedule`, `generate_split_points`, end of 2024), and
keeps parameters and gradients whole until the last microbatch (`stage.backward_maybe_with_nosync` of
torch.distributed.pipelining: in our terms ZeRO-1); its selective recomputation by op makes every second matrix product
again (`alternate`).
Megatron-LM's README also says that 175B at batch 1,152 falls from 47 to 42 % MFU between 96 and 4,608 H100: two more
rows, marked as scaling.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paraplan.api import as_cluster
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link

Row = dict[str, Any]
Pins = dict[str, Any]

DEVICES = {"H100-SXM-80GB": "H100", "A100-SXM-80GB": "A100-80", "H100-96GB-HBM2e-500W": "H100-HBM2e-96"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
LLAMA: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
DEPTH = {"megatron_gpt": "layers", "torchtitan_llama": "num_hidden_layers"}
PER_LAYER = 2
"""Segments of a layer of either family: attention and feed-forward."""

DROPOUT = 0.1
"""Of rows of 2021 and 2022 (see `megatron_gpt`)."""

MFU = {96: 0.47, 4608: 0.42}
"""Of GPT-3 175B at batch 1,152, by H100s (Megatron-LM's README)."""
PEAK_TFLOPS = 989.4
"""What its MFU is a share of."""


@dataclass(frozen=True)
class Case:
    """A published row in the planner's terms.

    Attributes:
        file, name: which.
        settings, family: of the model.
        cluster: by name.
        batch, seq, precision: of a step.
        pins: what the row states.
        free: what it does not, one choice after another: alternatives, each further pins, the likeliest first.
        unit: of what was published, "TFLOP/s" or "tokens/s", per GPU.
        published: in it.
        work: of a step, in the unit's numerator (teraflops, tokens).
        gpus: how many.
        memory_gib: what the allocator reserved, 0 where the source does not say.
        keeps_logits: whether logits of all microbatches are kept to the step's end, as by torch's pipelines.
        alone: whether nothing runs beside a collective, as in ZeRO-3 of 2021.
        sums: whether products add up the gradients of weights.
        eager: whether norms, rotary embeddings and gated activations run kernel by kernel, as they are written out.
        kernels: whose kernels norms and sums over rows run (`Device.kernels`).
    """

    file: str
    name: str
    family: str
    settings: dict[str, Any]
    cluster: str
    batch: int
    seq: int
    precision: str
    pins: Pins
    free: tuple[tuple[Pins, ...], ...]
    unit: str
    published: float
    work: float
    gpus: int
    memory_gib: float = 0.0
    keeps_logits: bool = False
    alone: bool = False
    sums: bool = True
    eager: bool = False
    kernels: str = ""

    @property
    def layers(self) -> int:
        """Of the model."""
        return int(self.settings[DEPTH[self.family]])


def gpt_case(file: str, data: Row, row: Row) -> Case:
    """A GPT model, judged by TFLOP/s."""
    sizes = {**data, **data.get("models", {}).get(row.get("name", ""), {}), **row}
    h, layers, s, v, b = (int(sizes[key]) for key in ("hidden", "layers", "sequence", "vocab", "batch"))
    recompute = str(sizes.get("recompute", "full" if data.get("includes_recompute", False) else ""))
    again = bool(recompute)  # all such rows are of 2021 and 2022
    counted = again and "tflops_per_gpu" in row  # what runs twice counts twice
    flops = (
        (96 if counted else 72)
        * b
        * s
        * layers
        * h
        * h
        * (1 + s / (6 * h) + v / ((16 if counted else 12) * layers * h))
    )
    gpus, tp, pp = int(row["gpus"]), int(sizes.get("tp", 1)), int(sizes.get("pp", 1))
    dp = gpus // (tp * pp)
    pins: Pins = {"dp": dp}
    if tp > 1:
        pins |= {"tp": tp} | ({"sp": True} if sizes.get("sequence_parallel", not again) else {})
    if tp > 1 and not again:
        pins["overlap"] = OVERLAP
    if again:
        pins["recompute"] = recompute
    free: tuple[tuple[Pins, ...], ...] = ()
    if row.get("scheme") == "zero3":
        pins |= {"zero": 3, "microbatches": b // (gpus * int(row["microbatch"]))}
        free = (({}, {"offload": "host"}),)
    elif pp > 1:
        pins |= {"pp": pp}
        one = again and ("microbatch" in row or "scheme" not in row)
        each = row.get("stages_per_rank", 1 if one else None)
        free = pipelines(layers, pp, b // dp, each, int(row.get("microbatch", 1)))
    elif again:
        samples = (int(row["microbatch"]),) if "microbatch" in row else SAMPLES
        free = (tuple({"microbatches": b // dp // size} for size in samples if b // dp % size == 0),)
    if PRECISIONS[str(data["dtype"])] == "bf16":
        pins["reduce_dtype"] = "fp32"
    if "zero" not in pins and again:
        pins["zero"] = 0
    elif "zero" not in pins:
        free = (({"zero": 1}, {"zero": 0}), *free)
    settings = {
        "hidden": h,
        "layers": layers,
        "heads": int(sizes["heads"]),
        "vocab": v,
        "sequence": s,
        "tied": again,
        "flash": sizes.get("attention_fused", not again),
        "dropout": DROPOUT if again else 0.0,
    }
    said = row.get("scheme", row.get("recompute", ""))
    name = " ".join(str(part) for part in (row.get("name", "530B"), said, gpus) if part)
    published = float(row["tflops_per_gpu"]) if "tflops_per_gpu" in row else flops / 1e12 / gpus / row["iteration_s"]
    return Case(
        file, name, "megatron_gpt", settings, _cluster(data, gpus), b, s, PRECISIONS[str(data["dtype"])], pins, free,
        "TFLOP/s", published, flops / 1e12, gpus, alone=row.get("scheme") == "zero3",
        sums="recompute" in row or not again, kernels=_kernels(data, row),
    )  # fmt: skip


def _kernels(data: Row, row: Row) -> str:
    """Whose norms and sums over rows a row of Megatron-LM runs, by its time and size.

    H100 rows are of Megatron-Core over Transformer Engine; those of 2022 that say how they recompute of Megatron-LM
    with apex' persistent layer norm, which has their hidden sizes (12,288, 20,480, 25,600: `persist_ln_hidden_sizes` of
    its fused_layer_norm.py, added between the papers); those of 2021 of apex' older one, which is torch's.
    """
    if data["device"].startswith("H100"):
        return "transformer-engine"
    return "apex" if "recompute" in row else ""


def pipelines(
    layers: int, pp: int, batch: int, stages_per_position: int | None, microbatch: int
) -> tuple[tuple[Pins, ...], ...]:
    """Schedule with cuts, and microbatches, of a pipeline.

    Args:
        layers: of the model.
        pp: positions.
        batch: samples of one pipeline.
        stages_per_position: None for the choice: one; and where microbatches come in multiples of the positions, as
            Megatron-LM wants for interleaving, one layer a stage (at most `MOST_STAGES`).
        microbatch: samples of one.
    """
    each = [stages_per_position or 1]
    if stages_per_position is None and batch // microbatch % pp == 0:
        each.insert(0, max(v for v in range(1, MOST_STAGES + 1) if layers % (pp * v) == 0))
    schedules: tuple[Pins, ...] = tuple(
        {"schedule": "interleaved" if v > 1 else "1f1b", "stages": even_layers(layers, pp * v)}
        for v in dict.fromkeys(each)
    )
    return schedules, ({"microbatches": batch // microbatch},)


SAMPLES = (1, 2, 4)
"""Of a microbatch without a pipeline, where a source does not say."""
OVERLAP = 4
"""Pieces tried at most, where a source says that tensor-parallel communication is overlapped (Transformer Engine's)."""

MOST_STAGES = 8
"""Stages a position tried at most: beyond, messages outweigh what is left of the bubble."""


def even_layers(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Segments of every stage: as many layers each, the embedding with the first and the head with the last."""
    cuts = [1 + PER_LAYER * layers * stage // stages for stage in range(stages + 1)]
    cuts[0], cuts[-1] = 0, cuts[-1] + 1
    return tuple(itertools.pairwise(cuts))


def llama_case(file: str, data: Row, row: Row) -> Case:
    """A Llama, judged by tokens per second."""
    parallel, gpus, s = row["parallel"], int(row["gpus"]), int(row.get("sequence", data["sequence"]))
    fsdp, tp, pp, cp = (int(parallel.get(axis, 1)) for axis in ("fsdp", "tp", "pp", "cp"))
    batch = int(row["local_batch"]) * fsdp
    pins: Pins = {"dp": fsdp, "zero": 3, **({"tp": tp, "sp": True} if tp > 1 else {})}
    if cp > 1:
        pins |= {"cp": cp, "cp_mode": "stripes"}
    if row.get("async_tp", False):
        pins["overlap"] = OVERLAP
    pins |= {"recompute": "full-early-stop" if row["recompute"] == "full" else "alternate", "microbatches": 1}
    pins |= {"compiled": bool(row["compile"]), "reduce_dtype": "fp32"}
    free: tuple[tuple[Pins, ...], ...] = ()
    if pp > 1:
        pins |= {"pp": pp, "zero": 1, "microbatches": min(pp, int(row["local_batch"]))}
        free = (torchtitan_schedules(LLAMA[row["name"]]["num_hidden_layers"], pp, str(row.get("schedule", ""))),)
    float8 = "float8" in row["dtype"]
    said = {
        f"at {s}": "sequence" in row,
        str(row.get("schedule", "")): row.get("schedule") == "1f1b",
        "float8": float8,
        "compiled": row["compile"],
        "async": row.get("async_tp", False) and pp == 1,
    }
    degrees = "x".join(map(str, parallel.values()))
    name = " ".join((row["name"], degrees, *(word for word, is_so in said.items() if is_so)))
    return Case(
        file, name, "torchtitan_llama",
        {**LLAMA[row["name"]], "max_position_embeddings": s, "tie_word_embeddings": False, "loss_parallel": tp > 1},
        _cluster(data, gpus), batch, s, "fp8" if float8 else "bf16", pins, free, "tokens/s",
        float(row["tokens_per_s_per_gpu"]), batch * s, gpus, float(row.get("memory_gib", 0)), keeps_logits=pp > 1,
        sums=False, eager=not row["compile"],
    )  # fmt: skip


def llama3_case(file: str, data: Row, row: Row) -> Case:
    """Llama 3's own pre-training, judged by TFLOP/s: six floating-point operations a parameter and token, and those of
    all of attention's scores, as the source it cites for them counts (Chowdhery et al. 2022, appendix B)."""
    size = str(data["model"]).rpartition("-")[2]
    of, s, gpus = LLAMA[size], int(row["sequence"]), int(row["gpus"])
    tp, pp, cp, dp = (int(row[axis]) for axis in ("tp", "pp", "cp", "dp"))
    layers, h, batch = of["num_hidden_layers"], of["hidden_size"], int(row["batch_per_dp"]) * dp
    pins: Pins = {"dp": dp, "tp": tp, "sp": True, "pp": pp}
    if cp > 1:
        pins |= {"cp": cp, "cp_mode": "stripes"}
    kept = tuple({"zero": zero, "recompute": name} for name in ("none", "cheap") for zero in (1, 2))
    schedules = tuple(
        {"schedule": "interleaved", "stages": llama3_stages(layers, pp * v)} for v in (8, 4, 2) if pp * v <= layers + 2
    )
    return Case(
        file,
        " ".join([size, str(gpus), *([f"at {s}"] if cp > 1 else [])]),
        "torchtitan_llama",
        {**of, "max_position_embeddings": s, "tie_word_embeddings": False, "loss_parallel": tp > 1},
        _cluster(data, gpus),
        batch,
        s,
        PRECISIONS[str(data["dtype"])],
        pins,
        (kept, schedules, ({"microbatches": int(row["batch_per_dp"])},)),
        "TFLOP/s",
        float(row["tflops_per_gpu"]),
        batch * s * (6 * params_of(of) + 12 * layers * h * s) / 1e12,
        gpus,
        sums=False,
    )


def params_of(of: dict[str, Any]) -> int:
    """Of a Llama: those that multiply."""
    h, kv = of["hidden_size"], of["hidden_size"] * of["num_key_value_heads"] // of["num_attention_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * of["intermediate_size"]
    return int(of["num_hidden_layers"] * layer + h * of["vocab_size"])


def llama3_stages(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Segments of every stage: as many layers each, the first and the last one less (Llama Team 2024, 3.3.2)."""
    each = (layers + 2) // stages
    cuts = [1 + PER_LAYER * max(0, min(layers, each * stage - 1)) for stage in range(stages + 1)]
    cuts[0], cuts[-1] = 0, 2 + PER_LAYER * layers
    return tuple(itertools.pairwise(cuts))


def torchtitan_schedules(layers: int, pp: int, said: str) -> tuple[Pins, ...]:
    """Schedules with cuts of a pipeline, by the name a row gives its schedule; "" for the choice."""
    several: Pins = {"schedule": "interleaved", "stages": torchtitan_stages(layers, 2 * pp)}
    if "interleaved" in said:
        return (several,)
    one: Pins = {"schedule": said or "1f1b", "stages": torchtitan_stages(layers, pp)}
    return (one,) if said else (one, several)


def torchtitan_stages(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Segments of every stage: what layers are left over go one each to the stages after the first."""
    each, over = divmod(layers, stages)
    sizes = [each + (0 < stage <= over) for stage in range(stages)]
    cuts = [1 + PER_LAYER * sum(sizes[:stage]) for stage in range(stages + 1)]
    cuts[0], cuts[-1] = 0, cuts[-1] + 1
    return tuple(itertools.pairwise(cuts))


def scaling_rows(data: Row) -> list[Row]:
    """The strong scaling a README states beside its table, as rows: the 177B model of the table at other sizes."""
    base = next((row for row in data["rows"] if row.get("name") == "177B"), None)
    if base is None:
        return []
    return [
        {**base, "name": "175B scaling", "gpus": gpus, "batch": 1152, "tflops_per_gpu": share * PEAK_TFLOPS}
        for gpus, share in MFU.items()
    ]


def _cluster(data: Row, gpus: int) -> str:
    per_node, kind = int(data["gpus_per_node"]), DEVICES[data["device"]]
    return f"{per_node}x{kind}:{gpus // per_node}" if gpus > per_node else f"{gpus}x{kind}"


ZERO3_PART_S = 380e-6 / 8
"""What a gather or a scatter of DeepSpeed's ZeRO-3 of 2021 takes a host for each of its ranks: it made a view of every
rank's part, and torch copied the parts one by one. As its users measured it: 130 microseconds to prepare and 250 to
launch one over 8 GPUs, of small parameters (its issue 1069; that all of it grows with ranks is our reading). All the
while the device stood still: "the async version is not async at all, because each all_gather calls
torch.cuda.synchronize()" (its pull request 1188)."""


def cluster_of(case: Case) -> ClusterSpec:
    """The row's cluster, its devices with the row's kernels; where nothing runs beside a collective, with links over
    which they take the whole device."""
    cluster = as_cluster(case.cluster)
    groups = tuple(
        msgspec.structs.replace(each, device=msgspec.structs.replace(each.device, kernels=case.kernels))
        for each in cluster.groups
    )
    cluster = msgspec.structs.replace(cluster, groups=groups)
    if not case.alone:
        return cluster
    groups = tuple(msgspec.structs.replace(each, in_node=_alone(each.in_node)) for each in cluster.groups)
    between = _alone(cluster.between_nodes) if cluster.between_nodes is not None else None
    return msgspec.structs.replace(cluster, groups=groups, between_nodes=between)


def _alone(link: Link) -> Link:
    return msgspec.structs.replace(link, device_share=1.0, latency_s=link.latency_s + ZERO3_PART_S)


MAKERS = {"llama3.1": llama_case, "Llama-3.1-405B": llama3_case}
"""By a file's model; any other is a GPT."""


def read_cases(folder: Path) -> list[Case]:
    """Every row of every file."""
    found = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or "rows" not in data:
            raise SystemExit(f"{path}: not a file of published rows (an object with 'device', 'model', 'rows')")
        make = MAKERS.get(str(data.get("model", "")), gpt_case)
        found += [make(path.stem, data, row) for row in (*data["rows"], *scaling_rows(data))]
    return found
