"""The documents: their links, commands, sentences and blocks, and the site that is made of them."""
