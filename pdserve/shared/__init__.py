"""What all processes stand on: errors, time, addresses, fair shares. Imports nothing above it."""
