"""`pdserve bench drafts`: tokens a second with drafts, against the same without."""
