"""Tests of the documents: their links, commands, sentences and blocks, and the site made of them."""
