"""The HTTP server: what every request meets, whatever it asks for."""
