"""The page at `/`: what operators see of the cluster in a browser, and can do about it.

history.py   what the last hour was like, in bounded rings
live.py      GET /admin/live: all of it, and then news every second (`told`)
document.py  the page itself: its parts in `assets/`, put together at start
routes.py    paths, and what describes them
"""
