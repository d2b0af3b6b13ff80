"""What a comparison has shown: its verdicts in words, tables and plots, and one page of all."""
