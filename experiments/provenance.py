"""Records that pages quote come from a commit: nobody can rerun a tree that was never committed."""

import sys
from argparse import ArgumentParser

from titan_fp8moe.testing import commit


def add_trial(parser: ArgumentParser) -> None:
    parser.add_argument("--trial", action="store_true", help="record from files that differ from their commit")


def require_commit(trial: bool) -> None:
    """Ends the program, before it measures, if its files are not those of a commit."""
    name = commit()
    if trial or (name and not name.endswith("+")):
        return
    what = f"files differ from commit {name[:-1]}" if name else "there is no checkout"
    sys.exit(f"error: {what}; commit them, name the commit in $TITAN_FP8MOE_COMMIT, or pass --trial")
