"""The means of moving KV bytes, one file or one pair of files each; the seam is interface.py."""
