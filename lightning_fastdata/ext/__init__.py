"""Optional rooms: no other room imports them; ``registry`` finds what is in them by its name."""
