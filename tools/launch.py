"""Runs a command and shows its output at once. If it fails, the last line is its error or that of a rank, and not
torchrun's report.

python tools/launch.py torchrun --nproc_per_node=2 --tee=3 -m torchtitan.train --job.config_file=...
"""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable

RANK = re.compile(r"^(\[\w+\]:\s*)+")  # what torchrun and torchtitan put before a rank's lines
EXCEPTION = re.compile(r"^\s*(?:\w+\.)*(\w*(?:Error|Exception)|error): (.+)")


def last_error(lines: Iterable[str]) -> str | None:
    """The last exception, "error: ..." line or box of the configuration's parser; None if there is none of them."""
    error, box = None, None
    for line in lines:
        line = RANK.sub("", line.rstrip())
        if line.startswith("╭─"):
            box = []
        elif box is not None and line.startswith("│") and "───" not in line:
            box.append(line.strip("│ "))
        elif box is not None:
            error, box = " ".join(box), None
        elif match := EXCEPTION.match(line):
            error = match[2] if match[1] == "error" else f"{match[1]}: {match[2]}"
    return error


def main() -> int:
    # Into a pipe or a file Python writes blocks of 8 KB, torchrun and its ranks included: 50 steps at a time.
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(sys.argv[1:], env=environment, **pipes) as process:
        # Both signals are the command's to handle: torchrun ends its ranks. A terminal interrupts the command too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        lines = deque[str](maxlen=1000)
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode and (error := last_error(lines)):
        print(f"error: {error}", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
