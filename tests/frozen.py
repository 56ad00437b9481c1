"""The last import of the process whose forks tests run in: its half a million objects are no garbage of a fork's."""

import gc

gc.collect()
gc.freeze()
