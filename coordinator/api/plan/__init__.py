"""What is asked of the nodes.

`grammar` says what an answer must look like, `sampling` how its tokens are chosen and its text is
cut; `generations` what it consists of. It makes the requests, and bounds what one call may ask.
"""
