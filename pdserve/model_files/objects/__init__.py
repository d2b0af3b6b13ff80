"""Models in object stores: s3://, gs:// and https://.

opening.py    a store, by its address
listing.py    which files a model there has, and their versions
download.py   one file: resumed where it broke off, and its digest
snapshot.py   a model's files on this machine, fetched once and bounded
"""
