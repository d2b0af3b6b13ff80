"""`pdserve doctor`: the command, and one module per kind of component."""
