"""Code benchmarks, run in a sandbox, with scores that describe how they were made.

    task.py       a task: problems, stop strings, and how a completion becomes a test program
    tasks/        one small file per benchmark, and the registry of their names; data.py fetches and checks their files
    generation/   completions from lakh's engine or from an endpoint, and samples on disk
    sandbox/      runs untrusted programs; sandboxed/ is the code on the other side
    scoring/      pass@k and intervals, comparison, reproduction

    run.py        runs many samples on a pool of workers and writes result files; journal.py resumes after a stop
    calibrate.py  CPU limit of each problem, from its reference solution, and the cache of these measurements
    perplexity.py bits per byte on held-out code        watch.py   scores checkpoints as they appear

Scoring needs no torch and generating needs no sandbox: generation/, perplexity.py and watch.py import a model when
called.
"""
