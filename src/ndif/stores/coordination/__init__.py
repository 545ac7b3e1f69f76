"""How the processes of a server on many machines find each other: one leads, and all ask and read it."""
