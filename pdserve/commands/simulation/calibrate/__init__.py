"""`pdserve calibrate`: measures what the steps and pulls of live nodes take.

run      clusters to measure, and the file      drive    what clients send to them
samples  what the nodes measured meanwhile      fit      from these to a calibration
"""
