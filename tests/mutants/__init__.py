"""Implementations on purpose wrong (mutants) and unusual but right (equivalents): the trial of the suite itself."""
