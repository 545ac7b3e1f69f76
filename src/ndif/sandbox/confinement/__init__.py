"""The kernel's confinement of a process: namespaces, Landlock, seccomp and limits."""
