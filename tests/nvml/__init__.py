"""A stand-in for the NVIDIA driver's library, and the strings that move it."""
