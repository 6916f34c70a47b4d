"""Building and checking collective schedules: cache.py builds them for the native core, verify.py proves them."""
