"""Forms in which KV passes a network, other than as it is in the pool.

    codec.py      what a codec does
    catalog.py    which ones there are
    lossless.py   bytes that have a pattern, by Zstandard
    rows.py       rows that have been rounded, as codes of 8 bits
    chunks.py     what is sent of a read: chunk by chunk, coded and decoded in threads
    choice.py     which form is the fastest over a link: all of them bring equal bytes

What arrives are the bytes of the exporter's pool, to the bit. So which form was chosen changes
nothing but time, and a ticket's checksums hold for all.
"""
