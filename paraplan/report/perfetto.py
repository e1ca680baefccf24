"""A simulation as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank class, one thread per stream, memory as a counter.
"""

from __future__ import annotations

import msgspec

from paraplan.cost_models.simulator.rank_trace import RankTrace, Simulation

Event = dict[str, object]


def chrome_trace(simulation: Simulation) -> bytes:
    """JSON of the whole timeline; times in microseconds from the step's begin."""
    events: list[Event] = []
    for number, trace in enumerate(simulation.traces):
        ranks = simulation.rank_class.count(number)
        events.append(_named("process_name", number, 0, f"class {number}: {ranks} rank{'s' if ranks != 1 else ''}"))
        events.extend(_spans(number, trace))
        events.extend(_memory(number, trace))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(process: int, trace: RankTrace) -> list[Event]:
    threads = {
        stream: index for index, stream in enumerate(dict.fromkeys(["compute", *(span.stream for span in trace.spans)]))
    }
    events = [_named("thread_name", process, index, str(stream)) for stream, index in threads.items()]
    for span in trace.spans:
        events.append(
            {
                "ph": "X",
                "name": span.label,
                "cat": span.phase,
                "pid": process,
                "tid": threads[span.stream],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {
                    "action": span.action,
                    "segment": span.segment,
                    "microbatch": span.microbatch,
                    "busy_us": span.busy_s * 1e6,
                },
            }
        )
    return events


def _memory(process: int, trace: RankTrace) -> list[Event]:
    points = [(0.0, trace.start_bytes), *((point.end_s, point.live_bytes) for point in trace.memory)]
    return [
        {"ph": "C", "name": "live bytes", "pid": process, "ts": end * 1e6, "args": {"bytes": live}}
        for end, live in points
    ]
