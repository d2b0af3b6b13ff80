"""What is measured of nodes and loads, to predict with: files, and what live nodes tell.

samples        what a node's steps and pulls took       calibration    one kind of node
trace_lines    the requests of a cluster               routes         which tier of a cascade to ask
"""
