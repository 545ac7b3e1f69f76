"""What runs inside the model process. Imports nothing of ndif outside this folder."""
