"""Workers that fail or hang end."""

from tests.processes import TIMED_OUT, run_script, run_workers


def test_a_rank_that_fails_ends_the_others():
    code = "import os, sys, time; time.sleep(1000) if os.environ['RANK'] == '0' else sys.exit('its reason')"
    done = run_workers("-c", 2, code, cpu_only=True)
    assert (done.returncode, done.stderr.strip()) == (1, "its reason")


def test_a_process_that_hangs_ends():
    done = run_script("-c", "import time; print('begun', flush=True); time.sleep(1000)", seconds=1)
    assert (done.returncode, done.stdout) == (TIMED_OUT, "begun\n") and "stopped after" in done.stderr
