"""Where files and batches are kept: statements (`tables`), and the databases that they run on."""
