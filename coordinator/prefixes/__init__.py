"""Which nodes hold which prefixes of prompts.

`index` has what nodes say they hold, by block hash, and the hashes of one prompt.
`stability` finds what broke prefixes, and has the metrics of hits.
"""
