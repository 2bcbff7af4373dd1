"""The suite's tests: ``unit`` needs no server, ``server`` a real Triton, ``export`` the environment with torch."""
