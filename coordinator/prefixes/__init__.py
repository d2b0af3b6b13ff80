"""Which nodes hold which prefixes of prompts.

`index` has what nodes say they hold, by block hash; `hashes` are those of one prompt. `watch` has
the metrics of hits, and of what broke prefixes, which `stability` finds.
"""
