"""The web dashboard: live pages over the events of one run or many.

    find.py             finds run folders
    mirror.py           a local copy of runs in an object store
    table.py            per-step measurements in columns, and which steps were kept
    curves.py           curves for the page: a million points become a few hundred that keep every spike, means, and
                        the share of every goodput class over time
    notable.py          one sentence for each notable event
    interruptions.py    cause, detection, recovery and loss of every interruption
    fleet/              ranks by node, stragglers, links between ranks, findings of node checks
    slow_steps.py       steps that took far longer than usual
    run_files/          evaluations with samples and verdicts, training data, tags
    preview.py          a first look at a long run, before all of it is read
    records.py          records of any origin, with usable fields only
    numbers.py          numbers from files that may be malformed
    state.py            what the run is doing now, and the reason
    run_view.py         one run: consumes events, returns plain data
    runs.py             several runs, kept up to date
    page.py             the page as one self-contained HTML document: page/, with uPlot for the charts
    server/             the page and its data over HTTP, access, server-sent events, the pages that ask other programs

Reads events and files of a run only (run.toml, evaluations, the manifests of its data), so a script can read everything
that it shows. It never writes into a run. Independent of torch; only server/ needs aiohttp.
"""

from lakh.dashboard.runs import RunCollection

__all__ = ["RunCollection"]
