"""Backends on this machine (the protocol is server/backend.py): an engine in this process (in_process.py, stepped by
engine_thread.py), an engine in a child process (engine_process.py, engine_process_main.py), and a cache of completions
in front of either (completion_cache.py). response_queue.py carries deltas to one reader.
"""
