"""`pdserve doctor --cluster`: asks coordinators, and prints what `pdserve.findings` finds."""
