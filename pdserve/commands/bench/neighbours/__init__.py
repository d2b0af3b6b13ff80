"""`pdserve bench neighbours`: what one tenant feels of another, who behaves or attacks.

The other tenant is a process of its own (`attacker`), which makes one of the `attacks`, or calls
that are `generated`, through its `calls`. `measurement` is the tenant who should not feel it.
"""
