"""The web dashboard: live pages over the events of one run or many.

    find.py             finds run folders
    table.py            per-step measurements in columns, and which steps were kept
    curves.py           curves for the page: a million points become a few hundred that keep every spike, means, and
                        the share of every goodput class over time
    notable.py          one sentence for each notable event
    slow_steps.py       steps that took far longer than usual
    state.py            what the run is doing now, and the reason
    run_view.py         one run: consumes events, returns plain data
    runs.py             several runs, kept up to date
    page.py             the page as one self-contained HTML document
    server.py           the page and its data over HTTP

Reads events, storage and a run's run.toml only, so a script can read everything that it shows. It never
writes into a run. Independent of torch; only server.py needs aiohttp.
"""

from lakh.dashboard.runs import RunCollection

__all__ = ["RunCollection"]
