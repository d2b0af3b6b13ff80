"""Pure arithmetic: from what is to be moved to the bytes to copy."""
