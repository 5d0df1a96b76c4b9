"""Mutants whose fault only a GPU shows: real races, real overflows, real streams."""
