"""The processes of one model: the zygote, its runners and the weight owner."""
