"""The model plane: the code inside a model process. It imports the sandbox and nothing else of ndif."""
