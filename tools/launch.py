"""Runs a command and shows its output at once. If it fails, the last line is its error or that of a rank. torchrun's
report of it is left out where it only repeats what a rank has said.

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
REPORT = re.compile(r"^E\d{4} .*torch/distributed/elastic/.*\] failed \(exitcode")


def repeats(report: list[str], error: str | None) -> bool:
    """Whether torchrun's report, which ends with the first failure, adds nothing to the last error of the ranks shown.
    An exit status of 2 is that of a wrong command line, whose message is a rank's alone."""
    if (told := last_error(report)) is not None:
        return told == error
    return error is not None and any(re.match(r"\s*exitcode\s*: 2\b", line) for line in report)


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
        lines, report = deque[str](maxlen=1000), list[str]()
        for line in process.stdout:
            if (report or REPORT.match(line)) and not RANK.match(line):
                report.append(line)
            else:
                print(line, end="", flush=True)
                lines.append(line)
    if not repeats(report, last_error(lines)):
        print(*report, sep="", end="", flush=True)
    if process.returncode and (error := last_error([*lines, *report])):
        print(f"error: {error}", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
