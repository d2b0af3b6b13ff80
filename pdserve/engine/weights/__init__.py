"""From a checkpoint's files to weights that are ready to compute with."""
