"""What the source tree is like, in figures: `make house`, or `python -m tools.house`.

It looks at the files that git knows, so it can be copied into any other commit of this repository.
`--chat` also starts a cluster and counts the files that one chat enters.
"""
