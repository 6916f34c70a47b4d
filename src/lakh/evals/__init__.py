"""Judges: code benchmarks, run in a sandbox, with scores that say how they were made.

    task.py       what is asked: problems, stop strings, and how a completion becomes a test program
    tasks/        one small file per benchmark, and the table of their names; data.py fetches and checks their files
    samples.py    completions on disk, in the JSONL forms of openai/human-eval and EvalPlus
    generate.py   completions from lakh's own engine, hundreds of rows at once (bulk.py, bulk_gpu.py), or from an
                  endpoint (endpoint.py)

    sandbox.py    runs one program and says how it ended; goes down the ladder of walls
    walls.py bubblewrap.py landlock.py seccomp.py    what stands around it
    cell.py       one set of walls, kept warm for many programs; resident.py tells what it holds
    inside/       what runs behind the walls: candidate and examiner are two processes
    verdict.py    how a program ended, decided from what is known

    run.py        many programs over a pool of workers; result files; journal.py lets them go on after a stop
    calibrate.py  the CPU limit of each problem, from its reference solution; calibration_cache.py keeps what those need
    score.py      unbiased pass@k and its interval      compare.py     two results, and whether they differ
    protocol.py   the line that says how it was made    reproduce.py   the same result again from that line
    perplexity.py bits per byte on held-out code        watch.py       checkpoints scored as they appear

Scoring needs no torch, generating no sandbox: only generate.py, perplexity.py and watch.py reach a model, when called.
"""
