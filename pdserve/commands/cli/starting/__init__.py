"""What `pdserve up` and `pdserve demo` start clusters with: checks, forked nodes, their screen."""
