"""What crosses a boundary: requests, responses, model keys, and how each wire writes them."""
