"""The dashboard over HTTP, on aiohttp.

application.py    routes, and the server process
access.py         who may ask: loopback, or a token
changes.py        server-sent events
corpus.py         duplicates and dropped documents of a run's corpus
planning.py       the plan page
across.py         a plan for several sites, on the plan page
site_map.py       the map of the sites
lakh_command.py   a lakh command as a child process, for these
playground.py     the playground page, in front of a running server
"""

from lakh.dashboard.server.application import application, serve

__all__ = ["application", "serve"]
