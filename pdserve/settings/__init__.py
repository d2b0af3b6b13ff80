"""Settings: the structs that hold them, the flags and the file they are read from."""
