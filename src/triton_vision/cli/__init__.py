"""The command line, ``triton-vision``."""
