"""`pdserve bench neighbours`: what one tenant feels of another, who behaves or attacks.

calls.py       what an attacker sends, and how it sends it
attacks.py     the attacks, a row each
generated.py   attacks that nobody has thought of: calls drawn at random
attacker.py    the attacker's process
measurement.py the neighbour's calls beside each of them, and what its tail latency became
"""
