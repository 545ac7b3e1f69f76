"""The site of the documents: its generated pages, and what is done to those that are written."""
