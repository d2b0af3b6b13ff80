"""What prometheus-client lacks: collectors read at the scrape, and a text that is made in turns."""
