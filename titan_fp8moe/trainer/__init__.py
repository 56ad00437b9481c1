"""Around the layers, for any trainer: checks of a job, the plan of a conversion, watches, corrections of PyTorch.

A trainer or another release of one gets an adapter, a package beside this one. Copy the nearest: ``torchtitan03`` where
a converter replaces configs, ``torchtitan`` where it replaces modules. Files of the same name do the same work in each:

* ``modules`` hands the model's experts and routing to :func:`titan_fp8moe.layer.run.run_layer`.
* ``converter``, or ``conversion`` in 0.3, plans with :mod:`~titan_fp8moe.trainer.plan`, checks, and replaces them.
* ``job_checks`` translates the trainer's settings for :mod:`~titan_fp8moe.trainer.preflight`.
* ``parallel`` and ``compiling`` change the trainer's steps, through :mod:`titan_fp8moe.patches`.
* ``metrics`` runs :mod:`~titan_fp8moe.trainer.nan_watch`; ``dry_run`` and ``cpu`` complete the files of those names.

Outside of the adapter: ``versions.py``, ``warm_up.py``, which picks an adapter's dry run, and the lists of adapters in
``tests/test_rooms.py`` and CONTRIBUTING.md.
"""
