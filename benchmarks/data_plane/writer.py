"""The producing process of a stream round: makes its events, says so, and writes them when told to.

A line on stdin is a round: `start groups turns tokens`. It answers `ready`, waits for another line, writes, and answers the
CPU seconds that took once everything is acknowledged.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.data_plane.workload import Shape, group_ids, interleaved, trajectories
from journal.producer import AckProducer
from schemas.settings import Settings


def main() -> None:
    """Rounds until stdin ends."""
    settings = Settings.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    producer = AckProducer(settings.kafka, "bench-writer")
    for line in sys.stdin:
        start, groups, turns, tokens = map(int, line.split())
        events = list(interleaved(trajectories(Shape(turns, tokens), group_ids(start, groups))))
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.process_time()
        for event in events:
            producer.post(event)
        producer.flush()
        print(time.process_time() - began, flush=True)
    producer.close()


if __name__ == "__main__":
    main()
