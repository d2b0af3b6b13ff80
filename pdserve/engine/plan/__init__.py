"""A model, said once: its layers, their norms and matrices, and the form of these. No torch here.

What files must hold, what a decoder allocates or packs, and what a step costs is derived from it.
"""
