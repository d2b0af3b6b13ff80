"""`pdserve route`: fits and judges classifiers that say which tier of a cascade to ask first."""
