"""Call-backs of ended jobs: their guard, their two forms, and the delivery that repeats what failed."""
