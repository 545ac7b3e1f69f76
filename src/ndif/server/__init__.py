"""What a server is put together from, in each of its sizes."""
