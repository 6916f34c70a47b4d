"""What answers requests on this machine (backend.py says what that means): an engine in this process (local.py,
stepped by worker.py's thread), one in a process of its own (process.py), and answers that are known already
(textcache.py).
"""
