"""The input of a step: its plan as tensors, in memory that is kept between steps."""
