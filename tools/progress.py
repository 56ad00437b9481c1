"""Shows that a command is alive: its log's steps, or its output as it comes, and a line in ten silent seconds.

./tools/run_train.sh 2>&1 | tee train.log | python tools/progress.py bf16 200   # of a training log what a reader wants
pip install -q torch 2>&1 | python tools/progress.py "installing"               # without a number of steps everything
"""

import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

EVERY_S = 5.0  # at most one step line in this time
SILENT_S = 9.0  # after this time without output, a line that says for how long it has run
T = TypeVar("T")
STEP = re.compile(r"step: *(\d+) +loss: *(\S+).*?memory: *([\d.]+)GiB.*?tps: *([\d,]+)")


def shown(lines: Iterable[str | None], name: str, steps: int) -> Iterator[str]:
    """Picks what to print of each line of a training log; None stands for ``SILENT_S`` without one."""
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
            yield f"{name}: {text}\n"


def passed_on(chunks: Iterable[bytes | None], name: str) -> Iterator[bytes]:
    """Yields output as it comes, lines without an end included; None stands for ``SILENT_S`` without any."""
    begin, at_begin = time.monotonic(), True
    for chunk in chunks:
        if chunk is None:
            line_end = b"" if at_begin else b"\n"
            yield line_end + f"{name}: {time.monotonic() - begin:.0f} s\n".encode()
            at_begin = True
        else:
            yield chunk
            at_begin = chunk.endswith(b"\n")


def with_pauses(items: Iterable[T]) -> Iterator[T | None]:
    """The items as they come, and None after each ``SILENT_S`` without one."""
    arrived = queue.SimpleQueue()
    ended = object()

    def read() -> None:
        for item in items:
            arrived.put(item)
        arrived.put(ended)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            if (item := arrived.get(timeout=SILENT_S)) is ended:
                return
            yield item
        except queue.Empty:
            yield None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted command may still say something
    name, *steps = sys.argv[1:]
    if steps:
        texts = (text.encode() for text in shown(with_pauses(sys.stdin), name, int(steps[0])))
    else:
        texts = passed_on(with_pauses(iter(lambda: os.read(0, 1 << 16), b"")), name)
    for text in texts:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
