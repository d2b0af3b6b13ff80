"""The model's skills: each file generates the text of one, or what several are made of."""
