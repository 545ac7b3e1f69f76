"""What the claims about speed and size rest on: `make bench`."""
