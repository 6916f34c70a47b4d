"""Judges: code benchmarks, run in a sandbox, with scores that say how they were made.

    task.py       what is asked: problems, stop strings, and how a completion becomes a test program
    tasks/        one small file per benchmark, and the table of their names
    samples.py    completions on disk, in the JSONL form of openai/human-eval
    generate.py   completions from lakh's own engine
    sandbox.py    runs one program and says how it ended: passed, failed, timeout, memory, output, sandbox_error
    bubblewrap.py seccomp.py harness.py   the walls of that sandbox, and the process inside it
    run.py        many programs over a pool of workers; result files
    score.py      unbiased pass@k and its interval

Scoring needs no torch: only generate.py reaches the engine, when it is called.
"""
