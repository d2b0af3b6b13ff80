"""What is asked of the nodes.

`parts` says what an answer consists of, `grammar` what it must look like, `sampling` how its tokens
are chosen and its text is cut; `generations` makes the requests, and bounds what one call may ask.
"""
