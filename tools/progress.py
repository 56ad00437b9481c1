"""Shows a training log that comes on stdin: step lines, a line at least every ten seconds, and the error if it fails.

./tools/run_train.sh 2>&1 | tee train.log | python tools/progress.py NAME STEPS
"""

import queue
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator

EVERY_S = 5.0  # at most one step line in this time
SILENT_S = 9.0  # after this time without a line, one that says for how long it has run
STEP = re.compile(r"step: *(\d+) +loss: *(\S+).*?memory: *([\d.]+)GiB.*?tps: *([\d,]+)")


def shown(lines: Iterable[str | None], name: str, steps: int) -> Iterator[str]:
    """What to print for each line of the log; None stands for ``SILENT_S`` without one."""
    begin = last = time.monotonic()
    at = "starting"
    for line in lines:
        now = time.monotonic()
        text = None
        if line is None:
            text = f"{at}, {now - begin:.0f} s"
        elif match := STEP.search(line):
            step, loss, memory, tokens = match.groups()
            at = f"step {step} of {steps}"
            if now - last >= EVERY_S or int(step) in (1, steps):
                text = f"{at}: loss {loss}, {tokens} tokens/s, {memory} GiB"
        elif "FP8-Flow-MoE:" in line:
            text = line[line.index("FP8-Flow-MoE:") :].strip()
        elif now - last >= SILENT_S:
            text = f"{at}, {now - begin:.0f} s"
        if text is not None:
            last = now
            yield f"{name}: {text}"


def with_pauses(lines: Iterable[str]) -> Iterator[str | None]:
    """The lines as they come, and None after each ``SILENT_S`` without one."""
    arrived = queue.SimpleQueue[str | None]()

    def read() -> None:
        for line in lines:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            if (line := arrived.get(timeout=SILENT_S)) is None:
                return
            yield line
        except queue.Empty:
            yield None


if __name__ == "__main__":
    for text in shown(with_pauses(sys.stdin), sys.argv[1], int(sys.argv[2])):
        print(text, flush=True)
