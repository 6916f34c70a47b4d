"""The control room: pages over the events of runs, for people.

    find.py        which folders are runs
    tail.py        new lines of a run's event files, in order of time, a bounded bite at a time
    table.py       what each step measured, in columns, and which steps were kept
    thin.py        a million points as a few hundred in which every spike is still there
    curves.py      what a page draws: thinned points, and the mean of each stretch
    goodput_timeline.py  where the time went, over the clock
    unusual.py     events worth a sentence
    state.py       what the run is doing now, and why we think so
    watched.py     one run: folds events in, gives data out
    house.py       several runs, kept up to date
    page.py        the page with all it needs inside
    server.py      the page and its data over HTTP

Reads `lakh.events`, `lakh.storage` and a run's run.toml and nothing else: whatever it shows, a script can read too.
It never writes into a run. Nothing here needs torch; only server.py needs aiohttp.
"""

from lakh.room.house import House

__all__ = ["House"]
