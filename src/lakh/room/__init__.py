"""The control room: pages over the events and files of a run. Empty so far.

It will read `lakh.events` and `lakh.storage` and nothing else: whatever it shows, a script can read too.
"""
